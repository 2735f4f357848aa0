r"""What ways of writing an answer differ in without meaning anything. Standard library only."""

import re

_WRAPPERS = (
    r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|mbox|operatorname)"
)
_UNIT = re.compile(rf"(?<=[\d}}])\s*{_WRAPPERS}\s*\{{([^{{}}]*)\}}\s*(\^\s*\{{?-?\d\}}?)?\s*$")
_SPACING = re.compile(r"(?:\\[,;: ]|~|\\q?quad(?![A-Za-z])|\s)+")
_DROPPED = re.compile(
    r"\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big|displaystyle|textstyle)(?![A-Za-z])"
    r"|\\!|\\\$|\$|\\[()\[\]]|\^\s*(?:\\circ|\{\s*\\circ\s*\})|°|\\degrees?(?![A-Za-z])"
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_CHOICE = re.compile(r"^\(([A-Z])\)$")
_JOINING = re.compile(r"^(?:and|or)$")


def normalise(text: str) -> str:
    r"""Removes what is only typography: spacing, dollar signs, degree signs, ``\left``, fonts.

    >>> normalise(r"$\left(\dfrac{1}{2},\; 1{,}000\right)$."), normalise(r"\text{ even }")
    ('(\\frac{1}{2}, 1,000)', 'even')
    """
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = text.replace("{,}", ",").replace("−", "-").replace("\\%", "%")
    text = re.sub(r"\\(?:leq?|leqslant)(?![A-Za-z])", r"\\le ", text)
    text = re.sub(r"\\(?:geq?|geqslant)(?![A-Za-z])", r"\\ge ", text)
    text = re.sub(r",\\!\s*", ",", text)
    # A row break of a matrix is two backslashes, which the spacing rules must not eat.
    text = " \\\\ ".join(_DROPPED.sub("", part) for part in text.split("\\\\"))
    text = re.sub(_WRAPPERS + r"\s*\{([^{}]*)\}", _unwrap, text)
    text = " \\\\ ".join(_SPACING.sub(" ", part).strip() for part in text.split("\\\\"))
    text = text.strip().rstrip(".,;").strip()
    if not re.search(r"[(\[{]", text):
        text = _THOUSANDS.sub(lambda m: m.group().replace(",", ""), text)
    while text.startswith("{") and braced(text, 1) == text[1:-1]:
        text = text[1:-1].strip()
    return text


def split_unit(text: str) -> tuple[str, str]:
    r"""Separates a unit written as text behind a number.

    >>> split_unit(r"12 \text{ cm}^2"), split_unit(r"\text{even}")
    (('12', 'cm^2'), ('\\text{even}', ''))
    """
    match = _UNIT.search(text)
    if not match or _JOINING.match(match.group(1).strip()):
        return text, ""
    unit = re.sub(r"[\s~{}]|\\[,;: ]", "", match.group(1) + (match.group(2) or ""))
    return text[: match.start()], unit.lower()


def plain(text: str) -> str:
    """A normalised text without spaces, needless braces and the kind of a matrix's brackets."""
    text = re.sub(r"(?<=[_^])\s*\{(\w)\}", r"\1", text)
    # Two digits with a space between are no number; other spaces mean nothing.
    text = _CHOICE.sub(r"\1", re.sub(r"\s+(?!\d)|(?<!\d)\s+", "", text))
    return re.sub(r"(?<=\{)[pbvB]matrix(?=\})", "matrix", text)


def same_text(gold: str, answer: str) -> bool:
    """Equality of normalised texts, blind to spaces and to the case of words."""
    gold, answer = plain(gold), plain(answer)
    if gold == answer:
        return True
    words = is_word(gold) and is_word(answer)
    return words and gold.lower() == answer.lower()


def is_word(text: str) -> bool:
    """Whether a text is a word or several; two letters may be a product or two points."""
    return re.fullmatch(r"[A-Za-z]{3,}", plain(text)) is not None


def braced(text: str, start: int) -> str | None:
    r"""The text from ``start`` (just behind an open brace) to its closing brace, or None."""
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
        at += 1
    return None


def _unwrap(match: re.Match) -> str:
    content = match.group(1)
    # `1\text{and}2`: words stay apart from what they stand between.
    return f" {content} " if re.fullmatch(r"\s*[A-Za-z ]{2,}", content) else content
