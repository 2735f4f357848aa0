"""Small tokenizers in Hugging Face format, built in place."""

import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

# ChatML with Qwen3's rule for thinking: only an explicit False closes an empty think block.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
BYTES = 256  # ids below this are single bytes
END_OF_TEXT, IM_START, IM_END, THINK, THINK_END = range(BYTES, BYTES + 5)


def byte_id(byte: int) -> int:
    """The id of a byte in `save_qwen3_like`."""
    return sorted(pre_tokenizers.ByteLevel.alphabet()).index(_BYTE_TO_CHAR[byte])


def save_qwen3_like(path: Path) -> Path:
    """Byte-level BPE without merges, Qwen3's special tokens, think tags and template rule.

    Pad is <|endoftext|>, eos is <|im_end|>, no BOS; the added ids come after the bytes.
    """
    raw = RawTokenizer(
        models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    raw.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )
    hf.save_pretrained(str(path))
    return path


def save_words(
    path: Path, words: list[str], *, eos: str, template: str | None = None, bos: str | None = None
) -> Path:
    """One id a word, in order; joined without spaces when decoded. A BOS is added by default."""
    raw = RawTokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, words[0]))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.decoder = decoders.Fuse()
    named = {"eos_token": eos, "pad_token": eos}
    if bos is not None:
        named["bos_token"] = bos
        raw.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, words.index(bos))]
        )
    hf = PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=template, **named)
    hf.save_pretrained(str(path))
    return path


def write_json(path: Path, **content: object) -> None:
    """A small JSON file."""
    path.write_text(json.dumps(content), "utf-8")


def _bytes_to_chars() -> dict[int, str]:
    """GPT-2's printable stand-ins for bytes: themselves where printable, else from U+0100 on."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [b for b in range(BYTES) if b not in kept]
    return {b: chr(b) for b in kept} | {b: chr(BYTES + n) for n, b in enumerate(moved)}


_BYTE_TO_CHAR = _bytes_to_chars()
