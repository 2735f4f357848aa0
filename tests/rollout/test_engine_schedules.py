"""The guided engine on lookup models: what it records, and that no schedule changes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.rollout.keys import step_key
from saki_jax.rollout.resident import GUIDED_FIELDS, Sizes, allocate
from saki_jax.rollout.slots import commit, record
from saki_jax.rollout.stash import admit, prefill_next
from saki_jax.rollout.waiting import make_queue
from saki_jax.rollout.wave import guided_wave
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
    prompts_of,
    responses,
)

EPSILON = 0.05
KEY = step_key(0, 1)
PLAIN = {"block_size": 4}
SCHEDULES = [
    {"slots": 5, "refill_rows": 1, "waves_per_call": 3},
    {"slots": 7, "refill_rows": 3, "prefill_prompts": 2, "compact": 2},
    {"block_sizes": (2, 4), "block_costs": (3.0, 7.0), "waves_per_call": 1, "compact": 12},
]


def log_softmax(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


@pytest.mark.parametrize(
    "changes", [{"block_size": 4}, {"solver": "bisect", "teacher_sample": True}]
)
def test_records_describe_the_committed_tokens(changes):
    """Every number at every position equals the one formed from the whole logits."""
    student, teacher = tables(3)
    batch = prompts(3)
    r = guided(**changes)(student, teacher, batch, EPSILON, KEY)
    valid = np.asarray(r.valid)
    assert 5 < int(r.corrected.sum()) < valid.sum() / 2
    answers = responses(r)
    for b, t in zip(*np.nonzero(valid), strict=True):
        prompt = np.asarray(batch.tokens[b, : int(batch.length[b])]).tolist()
        index = context_index((*prompt, *answers[b][:t]), V, ORDER)
        log_p, log_t = log_softmax(student[index]), log_softmax(teacher[index])
        beta = float(r.beta[b, t])
        log_q = log_softmax((1 - beta) * log_p + beta * log_t)
        p, q = np.exp(log_p), np.exp(log_q)
        y, z = int(r.tokens[b, t]), int(r.proposal[b, t])
        expected = {
            "log_p": log_p[y],
            "log_t": log_t[y],
            "log_q": log_q[y],
            "accept_prob": min(1.0, q[z] / p[z]),
            "kl": (q * (log_q - log_p)).sum(),
            "tv": np.maximum(q - p, 0).sum(),
            "entropy": -(p * log_p).sum(),
        }
        for name, value in expected.items():
            assert float(getattr(r, name)[b, t]) == pytest.approx(value, abs=2e-5), name
        assert int(r.teacher_mode[b, t]) == int(np.argmax(log_t))
        assert float(r.kl[b, t]) <= EPSILON * (1 + 1e-5)
        if r.corrected[b, t]:
            assert q[y] > p[y]
            assert y != z
        else:
            assert y == z
            assert int(r.teacher_sample[b, t]) == 0
    for name in ("log_p", "log_t", "log_q"):
        assert np.isfinite(np.asarray(getattr(r, name))).all(), name


# --- the schedule does not matter -----------------------------------------------------------------


@pytest.fixture(scope="module")
def one_by_one():
    """What K = 1 gives: the same function of the noise as every other schedule."""
    return guided(block_size=1)(*tables(7), prompts(7), EPSILON, KEY)


@pytest.mark.parametrize("block", [2, 4, 8])
def test_s20_the_block_size_changes_nothing(one_by_one, block):
    assert one_by_one.corrected.sum() > 5
    r = guided(block_size=block)(*tables(7), prompts(7), EPSILON, KEY)
    # Sums over the vocabulary are ordered by the shape of the batch: numbers to an ulp or two.
    assert_same(r, one_by_one, but=("counters",), atol=1e-6)
    assert int(r.counters.waves) < int(one_by_one.counters.waves)


def test_s20_a_block_size_that_changes_on_the_way_changes_nothing(one_by_one):
    """Blocks of 8 and 2 in turn, over one pair of caches."""
    model, (student, teacher), batch = lookup_model(V, ORDER), tables(7), prompts(7)
    params, both = (student, teacher), (model, model)
    names = ("tokens", "corrected", "log_q", "beta")
    fields = {name: GUIDED_FIELDS[name] for name in names}
    wide = spec(block_size=8)
    state = allocate(both, wide, fields, batch, Sizes(ROWS, ROWS, ROWS, ROWS))
    queue = jax.tree.map(jnp.asarray, make_queue(batch, ROWS))
    widths = wide.prefill_widths(batch.tokens.shape[1])
    stash = prefill_next(both, params, state.stash, batch, queue, ROWS, widths)
    caches, slots, _ = admit(state.caches, state.slots, stash, batch, queue, jnp.int32(0), ROWS)

    @functools.partial(jax.jit, static_argnums=0)
    def one_wave(block_size, caches, slots, table):
        s = spec(block_size=block_size)
        epsilon = jnp.float32(EPSILON)
        caches, block = guided_wave(model, model, s, params, caches, slots, KEY, epsilon)
        block = block._replace(events={name: block.events[name] for name in names})
        after, kept = commit(slots, block, response_length=T, end_ids=s.end_ids)
        return caches, after, record(table, block, slots, kept)

    table = state.events
    for wave in range(T):
        caches, slots, table = one_wave((8, 2)[wave % 2], caches, slots, table)
    assert not slots.alive.any()
    for name in ("tokens", "corrected"):
        np.testing.assert_array_equal(table[name], getattr(one_by_one, name))
    for name in ("log_q", "beta"):
        np.testing.assert_allclose(table[name], getattr(one_by_one, name), rtol=0, atol=1e-6)


@pytest.mark.parametrize("changes", SCHEDULES)
def test_no_other_schedule_changes_anything(one_by_one, changes):
    r = guided(**changes)(*tables(7), prompts(7), EPSILON, KEY)
    assert_same(r, one_by_one, but=("counters",), atol=1e-6)


def test_a_prompt_is_prefilled_once_for_all_its_samples():
    """Four prompts, eight samples, not side by side; five slots, two prompts at a time."""
    texts = [[1, 2, 3], [4, 4], [5], [3, 2]] * 8
    batch = prompts_of(texts, width=4)
    run = guided(slots=5, refill_rows=2, prefill_prompts=2)
    r = run(*tables(7), batch, EPSILON, KEY)
    assert int(r.counters.prefilled) == 3  # and the prompt of one token has nothing to prefill
    each = guided(prefill_prompts=1)(*tables(7), batch, EPSILON, KEY)
    assert int(each.counters.prefilled) == 3
    assert_same(each, r, but=("counters",), atol=1e-6)
    # Were the samples of a prompt copies of one another's noise, or of another prompt's cache?
    assert len(set(responses(r))) > len(texts) // 2
    changed = prompts_of([[1, 2, 4], *texts[1:]], width=4)
    other = run(*tables(7), changed, EPSILON, KEY)
    assert int(other.counters.prefilled) == 4
    assert responses(other)[1:] == responses(r)[1:]


def test_s15_a_permuted_batch_gives_the_permuted_responses():
    batch = prompts(9)
    order = np.random.default_rng(0).permutation(ROWS)
    shuffled = jax.tree.map(lambda x: x[order], batch)
    run = guided(**PLAIN)
    r, s = (run(*tables(9), p, EPSILON, KEY) for p in (batch, shuffled))
    back = jax.tree.map(lambda x: x[np.argsort(order)] if x.ndim else x, s)
    assert_same(back, r, but=("counters",), atol=1e-6)


def test_s15_samples_of_one_prompt_and_steps_of_one_sample_differ():
    batch = prompts_of([[1, 2, 3]] * ROWS, width=4)
    run = guided(**PLAIN)
    first, second = (run(*tables(9), batch, EPSILON, step_key(0, step)) for step in (1, 2))
    assert len(set(responses(first))) > ROWS // 2
    assert not np.array_equal(first.tokens, second.tokens)


# --- epsilon 0 ------------------------------------------------------------------------------------


def test_s23_at_epsilon_zero_the_teacher_is_not_called_and_the_tokens_are_the_students():
    student, teacher = tables(11)
    alone = rollout_fn()(student, teacher, prompts(11), 0.0, KEY)
    assert int(alone.counters.teacher_forwards) == 0
    assert not alone.corrected.any()
    assert float(alone.epsilon) == 0.0
    through_bridge = guided(**PLAIN)(student, teacher, prompts(11), 0.0, KEY)
    assert int(through_bridge.counters.teacher_forwards) > 0
    assert_same(alone, through_bridge, but=("counters",), atol=1e-6)
    # A budget so small that no correction falls due in so few tokens.
    nearly = guided(**PLAIN)(student, teacher, prompts(11), 1e-12, KEY)
    np.testing.assert_array_equal(alone.tokens, nearly.tokens)


@pytest.mark.parametrize("epsilon", [-0.1, float("nan")])
def test_an_epsilon_that_is_no_budget_is_refused(epsilon):
    with pytest.raises(ValueError, match="must be at least 0"):
        rollout_fn()(*tables(11), prompts(11), epsilon, KEY)
