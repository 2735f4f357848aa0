"""Interleaved generation of SKD on lookup models: its law, its records, its schedules."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.rollout.generate import make_generate
from saki_jax.rollout.keys import Purpose, step_key
from saki_jax.rollout.skd import among_top, make_skd
from toy_engines import ORDER, T, V, assert_same, prompts, spec, tables
from toys import (
    chi_square_p_value,
    context_index,
    count_responses,
    lookup_model,
    prompts_of,
    responses,
    with_poisoned_cache,
)

LEVEL, REJECTED = 1e-4, 1e-12  # a fresh seed fails at LEVEL; wrong laws are far beyond
KEY = step_key(0, 1)
TOP_K = 3


@cache
def skd(top_k=TOP_K, **changes):
    model = lookup_model(V, ORDER)
    return make_skd(model, model, spec(compact=0, **changes), top_k=top_k)


def softmax(logits) -> np.ndarray:
    weight = np.exp(np.asarray(logits, np.float64))
    return weight / weight.sum()


def top(t: np.ndarray, k: int) -> np.ndarray:
    """Membership of the k largest; there are no ties here."""
    return t >= np.sort(t)[-k]


def one_token(p, t, k):
    """p restricted to the teacher's top k, and the rejected mass spread like T."""
    stands = top(t, k)
    return p * stands + p[~stands].sum() * t


def resampled_by_the_student(p, t, k):
    return p * top(t, k) / p[top(t, k)].sum()


def replaced_from_the_teachers_top(p, t, k):
    stands = top(t, k)
    return p * stands + p[~stands].sum() * t * stands / t[stands].sum()


def sequence_law(student, teacher, prompt, k, length, token_law=one_token):
    """Every response and its probability, by enumeration in float64."""
    law = {}

    def extend(response, probability):
        if len(response) == length or (response and response[-1] == 0):
            law[response] = probability
            return
        index = context_index((*prompt, *response), V, ORDER)
        for token, p in enumerate(token_law(softmax(student[index]), softmax(teacher[index]), k)):
            if p > 0:
                extend((*response, token), probability * p)

    extend((), 1.0)
    return law


def test_the_responses_follow_the_law_of_interleaved_sampling():
    student, teacher = tables(7, weight=0.7)
    run = skd(response_length=2, block_size=2)
    result = run(student, teacher, prompts_of([[2, 1]] * 100_000), 0.0, KEY)

    def p_value(*law):
        expected = sequence_law(student, teacher, (2, 1), *law)
        observed = dict.fromkeys(responses(result), 0.0) | expected
        return chi_square_p_value(*count_responses(result, observed))

    assert p_value(TOP_K, 2) > LEVEL
    assert p_value(TOP_K + 1, 2) < REJECTED
    assert p_value(TOP_K, 2, resampled_by_the_student) < REJECTED
    assert p_value(TOP_K, 2, replaced_from_the_teachers_top) < REJECTED


def test_records_describe_the_committed_tokens():
    student, teacher = tables(3, weight=0.7)
    batch = prompts(3)
    r = skd()(student, teacher, batch, 0.0, KEY)
    valid, answers = np.asarray(r.valid), responses(r)
    assert 5 < int(r.corrected.sum()) < valid.sum() / 2
    for b, t in zip(*np.nonzero(valid), strict=True):
        prompt = np.asarray(batch.tokens[b, : int(batch.length[b])]).tolist()
        index = context_index((*prompt, *answers[b][:t]), V, ORDER)
        p, q = softmax(student[index]), softmax(teacher[index])
        y, z = int(r.tokens[b, t]), int(r.proposal[b, t])
        assert float(r.log_p[b, t]) == pytest.approx(np.log(p[y]), abs=1e-5)
        assert float(r.log_t[b, t]) == pytest.approx(np.log(q[y]), abs=1e-5)
        assert float(r.entropy[b, t]) == pytest.approx(-(p * np.log(p)).sum(), abs=1e-5)
        assert int(r.teacher_mode[b, t]) == int(np.argmax(q))
        # Judged on the drafted token itself, at its own prefix.
        assert bool(r.corrected[b, t]) == (not top(q, TOP_K)[z])
        assert y == z or r.corrected[b, t]
    for name in ("beta", "tv", "kl", "log_q", "accept_prob"):
        assert not getattr(r, name).any(), name
    assert r.epsilon == 0.0
    waves = int(r.counters.waves)
    assert (int(r.counters.teacher_forwards), int(r.counters.student_forwards)) == (
        waves,
        4 * waves,
    )


@pytest.mark.parametrize(
    "changes", [{"block_size": 1}, {"block_size": 8, "slots": 5, "refill_rows": 2}]
)
def test_no_schedule_changes_a_token(changes):
    student, teacher = tables(5, weight=0.7)
    batch = prompts(5)
    expected = skd()(student, teacher, batch, 0.0, KEY)
    other = skd(**changes)(student, teacher, batch, 0.0, KEY)
    assert expected.corrected.any()
    assert_same(other, expected, but=("counters",), atol=1e-6)


def test_stale_cache_slots_are_not_seen():
    student, teacher = tables(6, weight=0.7)
    model = with_poisoned_cache(lookup_model(V, ORDER))
    poisoned = make_skd(model, model, spec(), top_k=TOP_K)
    expected = skd()(student, teacher, prompts(6), 0.0, KEY)
    assert_same(poisoned(student, teacher, prompts(6), 0.0, KEY), expected, atol=1e-6)


def test_a_teacher_that_lets_everything_stand_leaves_the_student_alone(caplog):
    student, teacher = tables(4)
    skd.cache_clear()
    result = skd(top_k=V)(student, teacher, prompts(4), 0.0, KEY)
    alone = make_generate(lookup_model(V, ORDER), spec())(student, prompts(4), KEY, Purpose.DRAFT)
    assert responses(result) == responses(alone)
    assert "lets every draft stand" in caplog.text
    assert not result.corrected.any()


def test_a_fully_accepted_block_commits_its_drafts_and_no_token_more():
    student, teacher = tables(4)
    result = skd(top_k=V, end_ids=())(student, teacher, prompts(4), 0.0, KEY)
    assert int(result.counters.waves) == T / 4


def test_rank_is_by_strictly_greater_logits():
    logits = jnp.array([3.0, 1.0, 1.0, 1.0, 0.0])
    inside = among_top(jnp.broadcast_to(logits, (5, 5)), jnp.arange(5), 2)
    assert inside.tolist() == [True, True, True, True, False]
    assert not among_top(logits, jnp.int32(4), 4)
    assert among_top(logits, jnp.int32(4), 5)


def test_a_teacher_that_breaks_ends_the_row():
    student, teacher = tables(2)
    result = skd()(student, jnp.full_like(teacher, jnp.nan), prompts(2), 0.0, KEY)
    assert result.nonfinite.all()
    assert not result.length.any()


def test_what_cannot_be_is_refused():
    model = lookup_model(V, ORDER)
    with pytest.raises(ValueError, match=r"6 logits and the teacher 7"):
        make_skd(model, lookup_model(V + 1, ORDER), spec(), top_k=2)
    with pytest.raises(ValueError, match="top_k is 0"):
        make_skd(model, model, spec(), top_k=0)


def test_other_seeds_draw_other_replacements():
    student, teacher = tables(8, weight=0.7)
    one, other = (skd()(student, teacher, prompts(8), 0.0, step_key(s, 1)) for s in (0, 1))
    assert responses(one) != responses(other)
    jax.tree.map(np.testing.assert_array_equal, one.prompts, other.prompts)
