"""The guided engine on lookup models at its edges: bad input and logits, caches, calls."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.rollout.engine import make_guided, make_rollout
from saki_jax.rollout.keys import step_key
from toy_engines import (
    ORDER,
    ROWS,
    T,
    V,
    assert_same,
    guided,
    prompts,
    rollout_fn,
    spec,
    tables,
)
from toys import (
    context_index,
    lookup_model,
    num_contexts,
    prompts_of,
    responses,
    with_cache_slots,
    with_poisoned_cache,
)

EPSILON = 0.05
KEY = step_key(0, 1)
PLAIN = {"block_size": 4}
REFILL = {"slots": 5, "refill_rows": 1, "waves_per_call": 3}


# --- bad input, bad logits ------------------------------------------------------------------------


def test_two_vocabularies_are_refused():
    with pytest.raises(ValueError, match="6 logits and the teacher 7"):
        make_guided(lookup_model(6), lookup_model(7), spec())


def test_prompts_that_cannot_be_answered_are_refused():
    good = prompts_of([[1], [2]])

    def run(batch):
        rollout_fn()(*tables(11), batch, EPSILON, KEY)

    with pytest.raises(ValueError, match="row 1 has length 0"):
        run(good.replace(length=jnp.array([1, 0])))
    with pytest.raises(ValueError, match="row 0 has length 9"):
        run(good.replace(length=jnp.array([9, 1])))
    with pytest.raises(ValueError, match="row 1 holds the id 6 at 0; the model has the ids"):
        run(prompts_of([[1], [6]]))
    with pytest.raises(ValueError, match="row 0 holds the id -1"):
        run(prompts_of([[2, -1], [1]]))
    with pytest.raises(ValueError, match="2 rows have only 1 distinct sequence ids"):
        run(good.replace(sequence_id=jnp.array([3, 3])))
    with pytest.raises(ValueError, match="at least one prompt"):
        run(jax.tree.map(lambda x: x[:0], good))


@pytest.mark.parametrize("block", [1, 4])
def test_s17_a_nan_of_the_teacher_stops_its_row_and_flags_it(block):
    student, teacher = tables(13)
    batch = prompts(13)
    row = 1  # its prompt's own context is the bad one
    prompt = np.asarray(batch.tokens[row, : int(batch.length[row])]).tolist()
    bad = teacher.at[context_index(prompt, V, ORDER), 2].set(jnp.nan)
    run = guided(block_size=block)
    clean, r = (run(student, t, batch, EPSILON, KEY) for t in (teacher, bad))
    assert bool(r.nonfinite[row])
    assert int(r.length[row]) == 0
    assert not r.corrected[row].any()
    assert not bool(r.finished[row])
    others = ~np.asarray(r.nonfinite)
    assert others.sum() > ROWS // 2
    for name in ("tokens", "corrected", "log_q", "length"):
        np.testing.assert_array_equal(getattr(r, name)[others], getattr(clean, name)[others])


@pytest.mark.parametrize("who", ["student", "teacher"])
@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
def test_s17_a_row_keeps_what_came_before_the_bad_logits_for_every_block_size(who, what):
    """Bad logits behind token 2: only a row that commits a 2 meets them, whatever it drafted."""
    behind_2 = jnp.array(
        [i for i in range(num_contexts(V, ORDER)) if (i // (V + 1)) % (V + 1) == 2]
    )
    assert context_index((3, 2), V, ORDER) in behind_2.tolist()
    spoilt = dict(zip(("student", "teacher"), tables(15), strict=True))
    # A single -inf is an excluded token and fine; a whole row of them is not.
    where = (behind_2,) if what == -np.inf else (behind_2, 3)
    spoilt[who] = spoilt[who].at[where].set(what)
    batch = prompts_of([[1], [3, 4], [5], [4]] * (ROWS // 4), width=4)
    results = [
        guided(block_size=k)(spoilt["student"], spoilt["teacher"], batch, EPSILON, KEY)
        for k in (1, 4, 8)
    ]
    assert 0 < results[0].nonfinite.sum() < ROWS
    for response, bad in zip(responses(results[0]), results[0].nonfinite, strict=True):
        assert bool(bad) == (2 in response and len(response) < T)
        assert 2 not in response[:-1]
    assert np.isfinite(np.asarray(results[0].log_q)).all()
    for r in results[1:]:
        assert_same(r, results[0], but=("counters",), atol=1e-6)


@pytest.mark.parametrize(
    "changes", [{"block_size": 4}, {"slots": 5, "refill_rows": 1, "waves_per_call": 3}]
)
def test_s16_finished_rows_and_free_slots_may_compute_nan(changes):
    """Every row that has ended meets NaN from then on; the others do not notice."""
    behind_end = jnp.array(
        [i for i in range(num_contexts(V, ORDER)) if (i // (V + 1)) % (V + 1) == 0]
    )
    assert context_index((3, 0), V, ORDER) in behind_end.tolist()
    clean = guided(**changes)(*tables(17), prompts(17), EPSILON, KEY)
    spoilt = [t.at[behind_end].set(jnp.nan) for t in tables(17)]
    assert_same(guided(**changes)(*spoilt, prompts(17), EPSILON, KEY), clean)
    assert clean.finished.any()
    assert (clean.tokens >= 0).all()


def test_s16_placeholders_behind_a_prompt_reach_no_embedding():
    batch = prompts(17)
    inside = np.arange(batch.tokens.shape[1])[None, :] < np.asarray(batch.length)[:, None]
    marked = batch.replace(tokens=jnp.where(inside, batch.tokens, -1))
    r, clean = (guided(**PLAIN)(*tables(17), p, EPSILON, KEY) for p in (marked, batch))
    assert_same(r, clean, but=("prompts",))


# --- the cache ------------------------------------------------------------------------------------


def test_s10_stale_slots_are_never_read():
    clean = guided(**REFILL)(*tables(19), prompts(19), EPSILON, KEY)
    poisoned = with_poisoned_cache(lookup_model(V, ORDER))
    run = make_guided(poisoned, poisoned, spec(**REFILL))
    assert_same(run(*tables(19), prompts(19), EPSILON, KEY), clean)
    assert clean.corrected.any()


def test_s14_a_row_that_reaches_the_end_of_its_cache_alters_nothing_before():
    """The widest prompt, the longest response, the shortest cache: as with twice the slots."""
    student, teacher = (t.at[:, 0].set(-30.0) for t in tables(21))  # rows do not end early
    short = guided(block_size=8)(student, teacher, prompts(21), EPSILON, KEY)
    model = with_cache_slots(lookup_model(V, ORDER), lambda slots: 2 * slots)
    long = make_guided(model, model, spec(block_size=8))
    assert_same(short, long(student, teacher, prompts(21), EPSILON, KEY))
    assert (short.length == T).all()


# --- calls ----------------------------------------------------------------------------------------


def test_j05_one_guided_and_one_student_only_program_whatever_epsilon_is():
    traces = {"student": 0, "teacher": 0}
    model = lookup_model(V, ORDER)

    def counted(name):
        def logits(params, hidden):
            traces[name] += 1
            return model.logits(params, hidden)

        return dataclasses.replace(model, logits=logits)

    changes = {"slots": 4, "waves_per_call": 2}
    run = make_rollout(counted("student"), counted("teacher"), spec(**changes))
    budgets = [0.02, np.float32(0.01), jnp.float32(0.005), 1, 1e-3, 0.0, 0, np.float32(0), 0.02]
    seen = []
    for step, epsilon in enumerate(budgets):
        run(*tables(step), prompts(step, rows=10), epsilon, step_key(0, step))
        seen.append(dict(traces))
    assert seen[0] == seen[4]  # one guided program
    assert seen[4] != seen[5]
    assert seen[5] == seen[8]  # and one for the student alone, with the scoring pass


def test_j11_a_rollout_owns_its_arrays_and_takes_nobody_elses():
    student, teacher = tables(23)
    batch = prompts(23)
    for run, epsilon in [(guided(**PLAIN), EPSILON), (rollout_fn(), 0.0)]:
        first = run(student, teacher, batch, epsilon, KEY)
        leaves = jax.tree.leaves(first)
        assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)
        # Donating the rollout to an update leaves prompts and parameters alone.
        jax.jit(lambda r: jax.tree.map(jnp.copy, r), donate_argnums=0)(first)
        assert run(student, teacher, batch, epsilon, KEY).tokens.shape == (ROWS, T)


def test_progress_is_told_between_calls():
    heard = []
    run = guided(**REFILL)
    r = run(*tables(25), prompts(25), EPSILON, KEY, heard.append)
    assert len(heard) > 3
    assert {p.rows_total for p in heard} == {ROWS}
    for before, after in itertools.pairwise(heard):
        assert 0 < after.waves - before.waves <= 3
        assert after.committed > before.committed
        assert after.rows_done >= before.rows_done
    assert heard[-1].rows_done == ROWS
    assert heard[-1].committed == int(r.counters.committed) == int(r.length.sum())
    assert heard[-1].corrections == int(r.corrected.sum())
