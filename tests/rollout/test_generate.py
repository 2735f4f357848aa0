"""The student alone: training rollouts at epsilon 0, and evaluation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.rollout.engine import make_rollout
from saki_jax.rollout.generate import describe_draw, make_generate
from saki_jax.rollout.keys import Purpose, step_key
from toy_engines import ORDER, ROWS, T, V, assert_same, guided, prompts, spec, tables
from toys import (
    blend,
    context_index,
    lookup_model,
    num_contexts,
    point_logits,
    prompts_of,
    random_table,
    responses,
    with_poisoned_cache,
)

KEY = step_key(0, 1)


@pytest.fixture(scope="module")
def generate():
    return make_generate(lookup_model(V, ORDER), spec())


def test_the_recorded_numbers_are_those_of_the_student(generate):
    student, _ = tables(3)
    batch = prompts(3)
    r = generate(student, batch, KEY, Purpose.DRAFT)
    answers = responses(r)
    for b, t in zip(*np.nonzero(np.asarray(r.valid)), strict=True):
        prompt = np.asarray(batch.tokens[b, : int(batch.length[b])]).tolist()
        logits = np.asarray(student[context_index((*prompt, *answers[b][:t]), V, ORDER)], float)
        log_p = logits - np.log(np.exp(logits).sum())
        assert float(r.log_p[b, t]) == pytest.approx(log_p[answers[b][t]], abs=1e-5)
        assert float(r.entropy[b, t]) == pytest.approx(-(np.exp(log_p) * log_p).sum(), abs=1e-5)
    np.testing.assert_array_equal(r.log_q, r.log_p)
    np.testing.assert_array_equal(r.proposal, r.tokens)
    np.testing.assert_array_equal(r.accept_prob, r.valid.astype(jnp.float32))
    for name in ("beta", "tv", "kl", "corrected", "log_t"):
        assert not getattr(r, name).any(), name
    assert int(r.counters.teacher_forwards) == 0
    assert int(r.counters.student_forwards) == int(r.length.max())
    assert int(r.counters.committed) == int(r.length.sum())


@pytest.mark.parametrize("changes", [{"slots": 5, "refill_rows": 2, "waves_per_call": 1}, {}])
def test_slots_and_stale_caches_change_nothing(generate, changes):
    model = with_poisoned_cache(lookup_model(V, ORDER))
    other = make_generate(model, spec(**changes))
    batch = prompts(5)
    r = generate(tables(5)[0], batch, KEY, Purpose.DRAFT)
    assert_same(other(tables(5)[0], batch, KEY, Purpose.DRAFT), r, but=("counters",), atol=1e-6)


def test_s15_a_row_alone_gives_the_tokens_it_gives_among_others(generate):
    batch = prompts(5)
    together = responses(generate(tables(5)[0], batch, KEY, Purpose.DRAFT))
    for row in (0, 7, ROWS - 1):
        alone = jax.tree.map(lambda x, row=row: x[row : row + 1], batch)
        assert responses(generate(tables(5)[0], alone, KEY, Purpose.DRAFT)) == [together[row]]


def test_t05_every_end_id_ends_a_row_and_only_the_cap_cuts():
    ends, size = (30, 31), 32
    # 1 2 30 | 11 12 13 31 | 21 -> 21 for ever
    chain = {0: 1, 1: 2, 2: 30, 10: 11, 11: 12, 12: 13, 13: 31, 20: 21, 21: 21}
    table = np.stack([point_logits(0, size)] * num_contexts(size, 1))
    for token, following in chain.items():
        for history in ([token], [0, token]):
            table[context_index(history, size, 1)] = point_logits(following, size)
    s = spec(response_length=8, end_ids=ends, pad_id=31)
    run = make_generate(lookup_model(size, order=1), s)
    r = run(jnp.asarray(table), prompts_of([[0], [10], [20]]), KEY, Purpose.EVALUATION)
    assert responses(r) == [(1, 2, 30), (11, 12, 13, 31), (21,) * 8]
    assert r.finished.tolist() == [True, True, False]
    assert float(r.truncated.mean()) == pytest.approx(1 / 3)
    assert r.valid.sum(axis=1).tolist() == [3, 4, 8]
    assert (r.tokens[0, 3:] == 31).all()  # pad is an end id: lengths tell, ids do not


def test_r21_evaluation_is_the_student_alone_with_randomness_of_its_own(generate):
    student, teacher = tables(7)
    batch = prompts(7)
    evaluation = generate(student, batch, step_key(99, 0), Purpose.EVALUATION)
    assert int(evaluation.counters.teacher_forwards) == 0
    # Training in between, guided and with other seeds, changes nothing.
    for seed, epsilon in enumerate((0.02, 0.05)):
        r = guided(block_size=4)(student, teacher, batch, epsilon, step_key(seed, 1))
        assert int(r.counters.teacher_forwards) > 0
        again = generate(student, batch, step_key(99, 0), Purpose.EVALUATION)
        assert_same(again, evaluation)
    other_k = make_generate(lookup_model(V, ORDER), spec(block_size=2))
    assert_same(other_k(student, batch, step_key(99, 0), Purpose.EVALUATION), evaluation)
    # Even under one key the two purposes draw apart.
    drafted = generate(student, batch, step_key(99, 0), Purpose.DRAFT)
    assert not np.array_equal(drafted.tokens, evaluation.tokens)


def test_s17_a_student_that_is_not_finite_is_flagged(generate):
    student, _ = tables(9)
    batch = prompts(9)
    clean = generate(student, batch, KEY, Purpose.DRAFT)
    prompt = np.asarray(batch.tokens[1, : int(batch.length[1])]).tolist()
    bad = student.at[context_index(prompt, V, ORDER)].set(jnp.nan)
    r = generate(bad, batch, KEY, Purpose.DRAFT)
    assert bool(r.nonfinite[1])
    assert int(r.length[1]) == 0
    good = ~np.asarray(r.nonfinite)
    assert good.sum() > ROWS // 2
    np.testing.assert_array_equal(r.tokens[good], clean.tokens[good])


def test_describe_draw_at_the_edges():
    inf = np.inf
    logits = jnp.array([[0.0, -inf, 0.0], [np.nan, 0, 0], [inf, 0, 0], [-inf, -inf, -inf]])
    log_p, entropy, nonfinite = describe_draw(logits, jnp.array([2, 0, 0, 0]))
    assert nonfinite.tolist() == [False, True, True, True]
    np.testing.assert_allclose(log_p, [-np.log(2), 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(entropy, [np.log(2), 0, 0, 0], atol=1e-6)


def test_j05_one_program_for_prompts_of_one_width():
    traces = []
    model = lookup_model(V, ORDER)

    def logits(params, hidden):
        traces.append(1)
        return model.logits(params, hidden)

    run = make_generate(dataclasses.replace(model, logits=logits), spec(waves_per_call=1))
    for step in range(3):
        batch = prompts(step, rows=8)
        if step == 2:  # NumPy prompts, and ids of another width
            batch = jax.tree.map(lambda x: np.asarray(x, np.int64), batch)
        run(blend(random_table(step, V), random_table(9, V), 0.5), batch, KEY, Purpose.DRAFT)
        if step == 0:
            first = len(traces)
    assert len(traces) == first
    assert spec(waves_per_call=1).for_student_only().waves_per_call < T  # several calls each


def test_at_epsilon_zero_the_engine_runs_the_very_program_of_generation():
    traces = []
    model = lookup_model(V, ORDER)

    def logits(params, hidden):
        traces.append(hidden.shape)
        return model.logits(params, hidden)

    student = dataclasses.replace(model, logits=logits)
    r = make_rollout(student, model, spec())(*tables(3), prompts(3), 0.0, KEY)
    compiled = len(traces)
    assert compiled > 0
    generate = make_generate(student, spec())
    assert_same(
        generate(tables(3)[0], prompts(3), KEY, Purpose.DRAFT),
        r,
        but=("log_t", "teacher_mode"),
    )
    assert len(traces) == compiled
    assert make_generate(student, spec()) is generate
    assert make_generate(student, spec(response_length=T - 1)) is not generate
