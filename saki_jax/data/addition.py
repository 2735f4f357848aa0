r"""The embedded task: adding two numbers with a carry scratchpad, least significant digit first.

    prompt      249+597=
    response    9+7+0=16;4+9+1=14;2+5+1=8;\boxed{846}

Each column reads digit + digit + carry = sum. Problems are generated; whether one is held out
depends on its operands alone, so no seed can move a problem from one side to the other.
"""

import hashlib
import re
from pathlib import Path

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from saki_jax.data.answer_format import BOX_COMMANDS
from saki_jax.data.prompts import Problem
from saki_jax.models import tokenizer

SOURCE = "addition"
DIGITS = (2, 4)
END_TOKEN = "<|endoftext|>"
BOX_OPEN = BOX_COMMANDS[0] + "{"
TOKENS = (*"0123456789+=;", BOX_OPEN, "}", END_TOKEN)
"""The vocabulary, id by id: characters, the opened box as one token, the end token last."""

MAX_PROMPT = 2 * DIGITS[1] + 2  # tokens of `9999+9999=`
MAX_RESPONSE = 9 * DIGITS[1] + 1 + (DIGITS[1] + 1) + 2  # columns, box, sum, brace and end token

_HELD_OUT = 8  # one problem in so many


def is_held_out(a: int, b: int) -> bool:
    """Whether a + b belongs to evaluation; b + a always goes with it."""
    key = f"{min(a, b)}+{max(a, b)}".encode()
    return hashlib.sha256(key).digest()[0] % _HELD_OUT == 0


def problem(a: int, b: int) -> Problem:
    """The problem a + b."""
    return Problem(f"{SOURCE}:{a}+{b}", f"{a}+{b}=", str(a + b), SOURCE)


def columns(a: int, b: int) -> list[tuple[int, int, int, int]]:
    """(digit of a, digit of b, carry in, sum) for each column, least significant first."""
    found, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        found.append((x, y, carry, x + y + carry))
        carry = (x + y + carry) // 10
    return found


def response(a: int, b: int) -> str:
    r"""The worked answer, without the end token.

    >>> response(249, 597)
    '9+7+0=16;4+9+1=14;2+5+1=8;\\boxed{846}'
    """
    pad = "".join(f"{x}+{y}+{c}={s};" for x, y, c, s in columns(a, b))
    return pad + BOX_OPEN + str(a + b) + "}"


def operands(
    count: int, *, held_out: bool, seed: int, digits: tuple[int, int] = DIGITS
) -> np.ndarray:
    """[count, 2] distinct pairs of equal length, the length uniform over the range of digits.

    Raises:
      ValueError: when the range of digits has fewer than twice that many problems on this side.
    """
    share = 1 / _HELD_OUT if held_out else 1 - 1 / _HELD_OUT
    available = int(share * sum((9 * 10 ** (n - 1)) ** 2 for n in range(digits[0], digits[1] + 1)))
    if 2 * count > available:
        raise ValueError(
            f"{count} problems asked of about {available} with {digits[0]} to {digits[1]} digits; "
            "ask for half of that at most, or for more digits"
        )
    rng = np.random.default_rng(seed)
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < count:
        low = 10 ** (int(rng.integers(digits[0], digits[1] + 1)) - 1)
        a, b = (int(x) for x in rng.integers(low, 10 * low, 2))
        if is_held_out(a, b) == held_out:
            pairs[a, b] = None
    return np.array(list(pairs), np.int64)


def problems(
    count: int, *, held_out: bool, seed: int, digits: tuple[int, int] = DIGITS
) -> list[Problem]:
    """Distinct problems of the training side or of the held-out side, in the order of the seed."""
    return [
        problem(int(a), int(b))
        for a, b in operands(count, held_out=held_out, seed=seed, digits=digits)
    ]


def save_tokenizer(path: str | Path) -> None:
    """Writes the task's tokenizer as a Hugging Face folder; pad is the end token, as in Qwen."""
    # Without an unknown token, text outside the vocabulary is an error and not an end token.
    raw = RawTokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(re.escape(BOX_OPEN) + "|."), "isolated")
    raw.decoder = decoders.Fuse()
    tokenizer.save(raw, path, end_token=END_TOKEN, pad_token=END_TOKEN)
