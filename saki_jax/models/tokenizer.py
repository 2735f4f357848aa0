"""Tokenizers of local Hugging Face folders, and the set of ids that end a response.

`tokenizer.json` is read as it stands: no class is chosen by model name and nothing is looked up
on a network.
"""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as RawTokenizer

# Nothing here needs PyTorch; without this, transformers says at every start that it is missing.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)


class TokenizerError(ValueError):
    """A tokenizer folder is not what it must be; the message names the file and what to do."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with what this project needs of it.

    Attributes:
      hf: the transformers object.
      path: folder it came from.
    """

    hf: PreTrainedTokenizerFast
    path: Path

    @cached_property
    def size(self) -> int:
        """One more than the highest id that has a token; the model's head must be as large."""
        return max(self._id_to_token) + 1

    @cached_property
    def token_map(self) -> dict[str, int]:
        """Every token's id, added tokens included."""
        return dict(self.hf.get_vocab())

    @cached_property
    def _id_to_token(self) -> dict[int, str]:
        return {i: token for token, i in self.token_map.items()}

    @property
    def pad_id(self) -> int:
        """Id to pad with: the pad token, else the end token, else 0. It may be an end id."""
        for found in (self.hf.pad_token_id, self.hf.eos_token_id):
            if found is not None:
                return int(found)
        return 0

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands; no BOS or other special token is added (case T04)."""
        return list(self.hf(text, add_special_tokens=False)["input_ids"])

    def chat(self, user: str, *, enable_thinking: bool) -> str:
        """One user turn in the chat template, with the assistant's header, as text.

        Raises:
          TokenizerError: when the folder has no chat template.
        """
        if not self.hf.chat_template:
            raise TokenizerError(
                f"{self.path} has no chat template; use data.template='raw', or a folder with "
                "chat_template.jinja or a chat_template in tokenizer_config.json"
            )
        return self.hf.apply_chat_template(
            [{"role": "user", "content": user}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=enable_thinking,
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids without special tokens. Ids without a token give no text (case T07)."""
        known = [int(i) for i in ids if int(i) in self._id_to_token]
        return self.hf.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def count_unknown(self, ids: Sequence[int]) -> int:
        """How many of the ids have no token: rows of the head beyond the tokenizer."""
        return sum(int(i) not in self._id_to_token for i in ids)


def load(path: str | Path) -> Tokenizer:
    """Reads the tokenizer of a local Hugging Face folder.

    Raises:
      TokenizerError: when the folder or its tokenizer.json is missing or cannot be read.
    """
    path = Path(path)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(
            f"{file} is missing; expected a local Hugging Face folder with tokenizer.json and "
            "tokenizer_config.json (nothing is downloaded)"
        )
    if file.read_bytes()[:40].startswith(b"version https://git-lfs"):
        raise TokenizerError(f"{file} is a Git-LFS pointer, not the file: run `git lfs pull` there")
    try:
        hf = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the Rust library raises Exception itself, nothing narrower
        raise TokenizerError(
            f"{file} (or tokenizer_config.json beside it) cannot be read as a tokenizer: {error}; "
            "copy the folder again from where it came"
        ) from error
    return Tokenizer(hf, path)


def save(raw: RawTokenizer, path: str | Path, *, end_token: str, pad_token: str) -> None:
    """Writes a tokenizer of the `tokenizers` library as a Hugging Face folder."""
    hf = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=end_token,
        pad_token=pad_token,
        clean_up_tokenization_spaces=False,
    )
    hf.save_pretrained(str(path))


def end_ids(paths: Sequence[str | Path], configured: Sequence[int] = ()) -> tuple[int, ...]:
    """The ids that end a response, one set for student and teacher (METHODS section 5).

    Args:
      paths: checkpoint folders, student and teacher.
      configured: the set to use as it is. Empty: the union of what config.json,
        generation_config.json and the tokenizer of all folders name.

    Returns:
      Sorted ids. Which file named which id is logged, and a disagreement is a warning (case T01).

    Raises:
      TokenizerError: when no file names an end id.
    """
    named = {str(file): ids for path in paths for file, ids in _named_end_ids(Path(path)).items()}
    told = "; ".join(f"{file}: {sorted(ids)}" for file, ids in named.items())
    if configured:
        chosen = sorted({int(i) for i in configured})
        log.info("end ids %s as configured (the files name: %s)", chosen, told or "none")
        return tuple(chosen)
    chosen = sorted(set().union(*named.values()))
    if not chosen:
        raise TokenizerError(
            f"no file of {[str(p) for p in paths]} names an end id; set rollout.end_ids"
        )
    disagree = any(ids != set(chosen) for ids in named.values())
    note = "the files disagree, so all are used" if disagree else "all files agree"
    log.log(
        logging.WARNING if disagree else logging.INFO, "end ids %s: %s (%s)", chosen, note, told
    )
    return tuple(chosen)


def check_pair(student: Tokenizer, teacher: Tokenizer) -> None:
    """Refuses two tokenizers that give a token different ids, or have different tokens.

    Raises:
      TokenizerError: naming both folders and the first tokens that differ.
    """
    if student.token_map == teacher.token_map:
        return
    tokens = student.token_map.keys() | teacher.token_map.keys()
    differ = sorted(t for t in tokens if student.token_map.get(t) != teacher.token_map.get(t))
    shown = ", ".join(
        f"{t!r}: {student.token_map.get(t)} / {teacher.token_map.get(t)}" for t in differ[:3]
    )
    raise TokenizerError(
        f"the token maps of {student.path} and {teacher.path} differ in {len(differ)} tokens "
        f"({shown}); distillation compares probabilities id by id, so both need the same tokenizer"
    )


def check_vocabularies(tokenizer: Tokenizer, student_vocab: int, teacher_vocab: int) -> None:
    """Refuses heads of different width (case T08), and a tokenizer larger than the head.

    Raises:
      TokenizerError: with the numbers.
    """
    if student_vocab != teacher_vocab:
        raise TokenizerError(
            f"the student's head has {student_vocab} rows, the teacher's {teacher_vocab}: "
            "distributions over different vocabularies cannot be compared; use checkpoints of "
            "equal width"
        )
    if tokenizer.size > student_vocab:
        raise TokenizerError(
            f"the tokenizer of {tokenizer.path} has ids up to {tokenizer.size - 1}, the head only "
            f"{student_vocab} rows: tokenizer and checkpoint do not belong together"
        )


def _named_end_ids(path: Path) -> dict[Path, set[int]]:
    """End ids by the file that names them, for the files that name any."""
    found = {}
    for name in ("config.json", "generation_config.json"):
        file = path / name
        if file.is_file():
            found[file] = _as_ids(json.loads(file.read_text("utf-8")).get("eos_token_id"), file)
    if (path / "tokenizer.json").is_file():
        eos = load(path).hf.eos_token_id
        found[path / "tokenizer_config.json"] = set() if eos is None else {int(eos)}
    return {file: ids for file, ids in found.items() if ids}


def _as_ids(value: object, file: Path) -> set[int]:
    values = value if isinstance(value, list) else [value]
    values = [v for v in values if v is not None]
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise TokenizerError(f"{file}: eos_token_id is {value!r}; expected an id or a list of ids")
    return set(values)
