r"""Answers made of answers: tuples, intervals, sets, lists, matrices. Standard library only.

(1, 2)  [2, 5)                                    ordered, by their brackets
\{1, 2\}   1, 2   1 and 2   x=1 or x=2   \pm 1    unordered
A \cup B                                          unordered, by the union sign
1 \le x < 2                                       the interval [1, 2)
x=-3, y=4                                         a tuple of values, when compared with one
matrices                                          ordered, by their shape
"""

import re
from dataclasses import dataclass

SCALAR, ORDERED, UNORDERED = "scalar", "ordered", "unordered"
SET, UNION = "set", "union"
MAX_PARTS = 64

_MATRIX = re.compile(r"^\\begin\{[pbvB]?matrix\}(.*)\\end\{[pbvB]?matrix\}$", re.DOTALL)
_CHAIN = re.compile(r"^(.+?)(<|\\le ?(?![a-z])|\\lt)\s*([A-Za-z])\s*(<|\\le ?(?![a-z])|\\lt)(.+)$")
_ASSIGNED = re.compile(r"^\s*([A-Za-z](?:_\{?\w+\}?)?)\s*=(?!=)([^=]+)$")
_WORD_JOIN = re.compile(r"(?:,\s*)?(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])\s*")


@dataclass(frozen=True)
class Form:
    """An answer taken apart.

    Attributes:
      kind: SCALAR, ORDERED or UNORDERED.
      marks: brackets, SET, UNION or a matrix's shape; forms with other marks are other answers.
      parts: the elements; of a scalar the text itself.
    """

    kind: str
    marks: str
    parts: tuple[str, ...]


def read(text: str) -> Form:
    r"""Takes a normalised answer apart, one level deep.

    >>> read("[2,5)"), read(r"\pm 2").parts, read("1 and 2").parts
    (Form(kind='ordered', marks='[)', parts=('2', '5')), ('2', '-2'), ('1', '2'))
    """
    text = text.strip()
    form = _matrix(text) or _union(text) or _brackets(text) or _list(text) or _chain(text)
    form = form or _plus_minus(text) or Form(SCALAR, "", (text,))
    return form if len(form.parts) <= MAX_PARTS else Form(SCALAR, "", (text,))


def as_tuple(form: Form) -> Form:
    r"""``x=-3, y=4`` as (-3, 4); ``x=1, x=2`` as the set of values; others as they are."""
    if form.kind is not UNORDERED or form.marks != SET:
        return form
    matches = [_ASSIGNED.match(part) for part in form.parts]
    if not all(matches):
        return form
    values = tuple(m[2].strip() for m in matches)
    names = [m[1] for m in matches]
    if len(set(names)) == 1:
        return Form(UNORDERED, SET, values)
    return Form(ORDERED, "()", values) if len(set(names)) == len(names) else form


def split(text: str, separator: str) -> list[str]:
    r"""Splits at the separators outside all brackets; [text] when brackets do not match.

    >>> split("(1,2), 3", ",")
    ['(1,2)', '3']
    """
    parts, depth, start, at = [], 0, 0, 0
    while at < len(text):
        if depth == 0 and text.startswith(separator, at):
            parts.append(text[start:at].strip())
            at += len(separator)
            start = at
            continue
        # `\{` opens like `{`; any other command is skipped with its backslash.
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[at], 0)
        at += 1
    return [*parts, text[start:].strip()] if depth == 0 else [text]


def _matrix(text: str) -> Form | None:
    match = _MATRIX.match(text)
    if not match:
        return None
    rows = [row.split("&") for row in match[1].strip().removesuffix("\\\\").split("\\\\")]
    cells = tuple(cell.strip() for row in rows for cell in row)
    if len({len(row) for row in rows}) > 1 or not all(cells):
        return None
    return Form(ORDERED, f"{len(rows)}x{len(rows[0])}", cells)


def _union(text: str) -> Form | None:
    parts = split(text, "\\cup")
    return Form(UNORDERED, UNION, tuple(parts)) if len(parts) > 1 and all(parts) else None


def _brackets(text: str) -> Form | None:
    if text.startswith("\\{") and text.endswith("\\}"):
        parts = split(text[2:-2], ",")
        return Form(UNORDERED, SET, tuple(parts)) if all(parts) and _closed(text[2:-2]) else None
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _closed(text[1:-1]):
        parts = split(text[1:-1], ",")
        if len(parts) > 1 and all(parts):
            return Form(ORDERED, text[0] + text[-1], tuple(parts))
    return None


def _list(text: str) -> Form | None:
    parts = split(_WORD_JOIN.sub(",", text), ",")
    return Form(UNORDERED, SET, tuple(parts)) if len(parts) > 1 and all(parts) else None


def _chain(text: str) -> Form | None:
    match = _CHAIN.match(text)
    if not match:
        return None
    opening, closing = ("[" if "le" in match[2] else "("), ("]" if "le" in match[4] else ")")
    return Form(ORDERED, opening + closing, (match[1].strip(), match[5].strip()))


def _plus_minus(text: str) -> Form | None:
    if len(_PLUS_MINUS.findall(text)) != 1:
        return None
    leading = _PLUS_MINUS.match(text) is not None
    plus = _PLUS_MINUS.sub("" if leading else "+", text)
    return Form(UNORDERED, SET, (plus, _PLUS_MINUS.sub("-", text)))


def _closed(text: str) -> bool:
    """Whether no bracket closes that was not opened inside."""
    depth = 0
    for character in text:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0
