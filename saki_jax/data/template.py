r"""From a question to prompt ids, one way for training, evaluation and teacher scoring.

Text is joined by concatenation only: questions contain braces and percent signs, so no formatting
operator may see them.
"""

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from saki_jax.data.answer_format import INSTRUCTION
from saki_jax.data.prompts import DataError, Problem
from saki_jax.models.tokenizer import Tokenizer

log = logging.getLogger(__name__)

VERBATIM = "verbatim"
TEMPLATES = ("raw", "chat")

# Instructions that public files have appended to their questions. The processed DAPO file writes
# the box with a doubled brace, a trace of a formatting operator that never ran.
_SUFFIX = re.compile(
    r"\s*(?:Please|Let's) (?:reason|think) step by step(?:,| and|, and)? "
    r"(?:put|output|write|give) (?:your|the) final answer (?:with)?in "
    r"\\boxed ?(?:\{\}|\{\{\}\})\.?\s*$"
)
# The raw DAPO file wraps its questions instead.
_DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'


@dataclass(frozen=True)
class PromptFormat:
    r"""How a question becomes a prompt.

    Attributes:
      template: "raw": the question itself; "chat": one user turn in the tokenizer's own chat
        template, with the generation prompt.
      instruction: appended to the question after one space; "" appends nothing; "verbatim" leaves
        the file's own instruction where it stands. In the other two cases instructions known from
        public files are stripped first.
      enable_thinking: passed to the chat template. False (the paper) closes an empty think block
        inside the prompt.
    """

    template: str = "chat"
    instruction: str = INSTRUCTION
    enable_thinking: bool = False

    def __post_init__(self) -> None:
        if self.template not in TEMPLATES:
            raise ValueError(f"template is {self.template!r}; expected one of {TEMPLATES}")


@dataclass(frozen=True)
class EncodedPrompts:
    """Problems with their prompt ids, right-padded.

    Attributes:
      problems: n problems, in the order given, without the over-long ones.
      tokens: [n, P] int32; what stands behind ``length`` is the pad id.
      length: [n] int32, at least 1.
      too_long: how many problems were left out for their length.
    """

    problems: tuple[Problem, ...]
    tokens: np.ndarray
    length: np.ndarray
    too_long: int = 0

    def __len__(self) -> int:
        return len(self.problems)

    def fingerprint(self) -> str:
        """SHA-256 over the valid ids: equal for byte-identical prompts, whatever the padding."""
        digest = hashlib.sha256()
        for row, length in zip(self.tokens, self.length, strict=True):
            digest.update(row[:length].astype("<i4").tobytes() + b"|")
        return digest.hexdigest()


def strip_instruction(question: str) -> str:
    r"""Removes an instruction known from public files, braces single or doubled.

    >>> suffix = r"Please reason step by step, and put your final answer within \boxed{{}}."
    >>> strip_instruction("What is $2+2$? " + suffix)
    'What is $2+2$?'
    """
    question = _SUFFIX.sub("", question)
    if question.startswith(_DAPO_HEAD) and question.rstrip().endswith(_DAPO_TAIL):
        question = question.rstrip()[len(_DAPO_HEAD) : -len(_DAPO_TAIL)]
    return question


def user_text(question: str, prompt_format: PromptFormat) -> str:
    """The question with the instruction as the format says, before any chat template."""
    if prompt_format.instruction == VERBATIM:
        return question
    question = strip_instruction(question)
    if not prompt_format.instruction:
        return question
    return question + " " + prompt_format.instruction


def render(question: str, prompt_format: PromptFormat, tokenizer: Tokenizer) -> str:
    """The whole prompt as text; its ids are ``tokenizer.encode(text)``."""
    text = user_text(question, prompt_format)
    if prompt_format.template == "raw":
        return text
    return tokenizer.chat(text, enable_thinking=prompt_format.enable_thinking)


def encode_prompts(
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    prompt_format: PromptFormat,
    *,
    max_length: int,
    too_long: str = "drop",
    multiple: int = 8,
) -> EncodedPrompts:
    """Prompt ids of all problems.

    Args:
      problems: the problems, in order.
      tokenizer: encodes without adding special tokens, so a template's own BOS stays alone.
      prompt_format: see `PromptFormat`.
      max_length: limit on the final ids, template and instruction included. Prompts are never cut.
      too_long: "drop" leaves longer ones out and logs the count, "error" raises.
      multiple: P is the longest prompt rounded up to a multiple of this.

    Raises:
      DataError: when a prompt is empty, is too long under "error", or none is left.
    """
    if too_long not in ("drop", "error"):
        raise ValueError(f"too_long is {too_long!r}; expected 'drop' or 'error'")
    kept, ids = [], []
    for problem in problems:
        encoded = tokenizer.encode(render(problem.problem, prompt_format, tokenizer))
        if not encoded:
            raise DataError(f"the prompt of {problem.id} has no tokens")
        if len(encoded) <= max_length:
            kept.append(problem)
            ids.append(encoded)
        elif too_long == "error":
            raise DataError(
                f"the prompt of {problem.id} has {len(encoded)} tokens, the limit is {max_length}: "
                "raise data.max_prompt_length, or set data.too_long to 'drop'"
            )
    dropped = len(problems) - len(kept)
    log.info("%d prompts; %d over %d tokens left out", len(kept), dropped, max_length)
    if not kept:
        raise DataError(f"no prompt of {len(problems)} is within {max_length} tokens")
    return EncodedPrompts(tuple(kept), *_pad(ids, tokenizer.pad_id, multiple), dropped)


def _pad(ids: Sequence[Sequence[int]], pad_id: int, multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-pads to [n, P] and gives the lengths [n]."""
    length = np.array([len(row) for row in ids], np.int32)
    width = -(-int(length.max()) // multiple) * multiple
    tokens = np.full((len(ids), width), pad_id, np.int32)
    for row, values in zip(tokens, ids, strict=True):
        row[: len(values)] = values
    return tokens, length
