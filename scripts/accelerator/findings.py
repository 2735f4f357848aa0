"""What a check finds, and the runner that no failing check can stop."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax


@dataclass(frozen=True)
class Setting:
    """What is compared with what, and how large.

    Attributes:
      device: the one under test.
      reference: a CPU device of the same process.
      layers, vocab: of the models whose numbers are compared.
      head_dims: one pair of models each.
      wide_vocab: of the bridge, the noise and the draws.
      law_rows: responses for each test of a law.
      rows, response_length: of the batches whose tokens are compared.
    """

    device: jax.Device
    reference: jax.Device
    layers: int = 4
    vocab: int = 8192
    head_dims: tuple[int, ...] = (64, 128)
    wide_vocab: int = 151_936
    law_rows: int = 100_000
    rows: int = 24
    response_length: int = 160


class Finding(NamedTuple):
    """A number and the bound that it must keep: at most, or with ``at_least`` at least."""

    value: float
    bound: float
    note: str = ""
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """NaN keeps no bound."""
        return bool(self.value >= self.bound if self.at_least else self.value <= self.bound)


Check = Callable[[], Finding]


def run(checks: Mapping[str, Check], deadline: float) -> Iterator[dict[str, Any]]:
    """Makes the checks one after the other; yields a row of plain values for each.

    A check that raises is a failed one whose note is the error. Whatever has not begun when
    ``deadline`` (of `time.monotonic`) has passed is reported as failed too: it was not shown.
    """
    for name, check in checks.items():
        began = time.monotonic()
        row = {"name": name, "passed": False, "value": None, "bound": None}
        if began > deadline:
            yield row | {"note": "not run: the time was over", "seconds": 0.0}
            continue
        try:
            found = check()
        # Compilers and drivers raise anything, and the other checks are worth having all the same.
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            row["note"] = f"{type(error).__name__}: {text}"
        else:
            bound = f"{'>=' if found.at_least else '<='} {found.bound:g}"
            row |= {"passed": found.passed, "value": float(found.value), "bound": bound}
            row["note"] = found.note
        yield row | {"seconds": time.monotonic() - began}


def line(row: Mapping[str, Any]) -> str:
    """One row of the table."""
    value = "–" if row["value"] is None else f"{row['value']:.3g}"
    verdict = "ok" if row["passed"] else "FAILED"
    return (
        f"{verdict:7}{row['name']:66}{value:>10} {row['bound'] or '':12}{row['seconds']:6.1f} s  "
        f"{row['note']}"
    ).rstrip()
