"""A table of figures as Markdown, CSV and JSON."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from saki_jax.evals.bootstrap import Estimate

Cell = str | int | float | Estimate | None
NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """Rows of cells under named columns.

    Attributes:
      name: key in files, such as ``table_1``.
      title: heading.
      columns: names.
      rows: cells, as many as columns. An `Estimate` is shown with its interval, None as a dash.
      note: said below the table.
      digits: decimals in Markdown.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    digits: int = 1

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.name}: {len(row)} cells under {len(self.columns)} columns")

    def to_markdown(self) -> str:
        """Heading, table and note."""
        lines = [f"### {self.title}", "", _line(self.columns)]
        lines.append("|" + "|".join(":--" if _is_text(c) else "--:" for c in self._kinds()) + "|")
        lines += [_line([_shown(cell, self.digits) for cell in row]) for row in self.rows]
        if self.note:
            lines += ["", self.note]
        return "\n".join(lines) + "\n"

    def to_csv(self) -> str:
        """One line a row; an estimate takes three columns: value, low, high."""
        spread = [
            any(isinstance(row[i], Estimate) for row in self.rows) for i in range(len(self.columns))
        ]
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        header: list[str] = []
        for column, wide in zip(self.columns, spread, strict=True):
            header += [column, f"{column} low", f"{column} high"] if wide else [column]
        writer.writerow(header)
        for row in self.rows:
            cells: list = []
            for cell, wide in zip(row, spread, strict=True):
                if isinstance(cell, Estimate):
                    cells += [cell.value, cell.low, cell.high]
                else:
                    empty = "" if cell is None else cell
                    cells += [empty, "", ""] if wide else [empty]
            writer.writerow(cells)
        return file.getvalue()

    def to_json(self) -> dict:
        """Everything, estimates as objects."""
        rows = [
            {
                column: cell.to_json() if isinstance(cell, Estimate) else cell
                for column, cell in zip(self.columns, row, strict=True)
            }
            for row in self.rows
        ]
        return {"title": self.title, "note": self.note, "rows": rows}

    def _kinds(self) -> list[Cell]:
        """A cell of each column that is not empty."""
        return [
            next((row[i] for row in self.rows if row[i] is not None), 0.0)
            for i in range(len(self.columns))
        ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _is_text(cell: Cell) -> bool:
    return isinstance(cell, str)


def _shown(cell: Cell, digits: int) -> str:
    if cell is None:
        return NOTHING
    if isinstance(cell, Estimate):
        value, low, high = (f"{x:z.{digits}f}" for x in (cell.value, cell.low, cell.high))
        return f"{value} [{low}, {high}]"
    return f"{cell:z.{digits}f}" if isinstance(cell, float) else str(cell)
