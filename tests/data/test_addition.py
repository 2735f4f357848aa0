"""The embedded addition task."""

import numpy as np
import pytest

from saki_jax.data import addition
from saki_jax.data.addition import is_held_out, operands, problems, response, save_tokenizer
from saki_jax.evals.grade import Verdict, grade
from saki_jax.models import tokenizer as tokenizers


def test_worked_examples():
    assert response(249, 597) == r"9+7+0=16;4+9+1=14;2+5+1=8;\boxed{846}"
    assert response(99, 1) == r"9+1+0=10;9+0+1=10;\boxed{100}"


def test_the_scratchpad_of_any_problem_is_right_and_graded_so():
    for a, b in operands(300, held_out=False, seed=1).tolist():
        carry, digits = 0, ""
        for x, y, c, s in addition.columns(a, b):
            assert (c, s) == (carry, x + y + carry)
            carry, digits = s // 10, str(s % 10) + digits
        assert int(f"{carry}{digits}") == a + b
        assert grade(gold=str(a + b), response=response(a, b)) is Verdict.CORRECT
        assert grade(gold=str(a + b + 1), response=response(a, b)) is Verdict.INCORRECT


def test_the_two_sides_never_share_a_sum():
    train = problems(2000, held_out=False, seed=0)
    held_out = problems(500, held_out=True, seed=0)
    unordered = [{frozenset(p.problem[:-1].split("+")) for p in side} for side in (train, held_out)]
    assert not unordered[0] & unordered[1]
    assert len({p.id for p in train}) == 2000
    assert problems(5, held_out=True, seed=0) == held_out[:5]
    assert problems(5, held_out=True, seed=1) != held_out[:5]


def test_the_split_is_the_same_everywhere():
    """Fixed values: a hash that changed with the process or version would move the split."""
    sides = "".join(str(int(is_held_out(a, 3 * a))) for a in range(100, 140))
    assert sides == "0100000000000010000100000111000010000000"
    share = np.mean([is_held_out(a, b) for a in range(100, 200) for b in range(200, 300)])
    assert abs(share - 1 / 8) < 0.02


def test_lengths_are_uniform_over_the_digits():
    digits = np.array([len(str(a)) for a, _ in operands(3000, held_out=False, seed=2).tolist()])
    for n in (2, 3, 4):
        assert abs((digits == n).mean() - 1 / 3) < 0.04  # 4.6 standard deviations


def test_too_many_problems_are_refused():
    with pytest.raises(ValueError, match="ask for half of that at most"):
        operands(600, held_out=True, seed=0, digits=(2, 2))


def test_the_tokenizer_reads_its_own_texts_and_only_those(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = tokenizers.load(tmp_path)
    text = addition.problem(9999, 9999).problem
    answer = response(9999, 9999)
    assert len(tokenizer.encode(text)) == addition.MAX_PROMPT
    ids = tokenizer.encode(answer + addition.END_TOKEN)
    assert len(ids) == addition.MAX_RESPONSE
    assert tokenizer.decode(ids) == answer
    assert ids[-1] == tokenizer.pad_id == tokenizer.hf.eos_token_id == len(addition.TOKENS) - 1
    with pytest.raises(Exception, match="Missing"):
        tokenizer.encode("x")
