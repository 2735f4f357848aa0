"""The engine on tiny Qwen3 models in float32: numerics that are not exact, real caches."""

import dataclasses
import functools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.models.config import PRESETS
from saki_jax.models.qwen3 import init_params, language_model
from saki_jax.models.sharding import make_mesh, param_shardings
from saki_jax.rollout.advance import advance
from saki_jax.rollout.engine import make_guided, make_rollout
from saki_jax.rollout.generate import make_generate, student_wave
from saki_jax.rollout.keys import Purpose, step_key
from saki_jax.rollout.packing import join
from saki_jax.rollout.resident import GUIDED_FIELDS, STUDENT_FIELDS, Sizes, allocate
from saki_jax.rollout.slots import Block, Slots, commit
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.rollout.waiting import make_queue
from saki_jax.rollout.wave import draft, guided_wave, verify
from toy_engines import assert_same
from toys import prompts_of, responses, with_poisoned_cache

CONFIG = PRESETS["tiny"]
MODEL = language_model(CONFIG, jnp.float32)
KEY = step_key(0, 1)
EPSILON = 0.004
END = 3


@cache
def pair():
    """A student and a teacher near enough for a correction rate of some percent."""
    student, other = (init_params(CONFIG, jax.random.key(i)) for i in (0, 1))
    louder = jax.tree.map(lambda x: 2 * x, student)
    return louder, jax.tree.map(lambda x, y: x + 0.4 * y, louder, other)


def batch(rows: int, seed: int = 0, width: int = 6):
    rng = np.random.default_rng(seed)
    lengths = 1 + np.arange(rows) % width
    texts = [rng.integers(4, CONFIG.vocab_size, n).tolist() for n in lengths]
    return prompts_of(texts, width=width)


def spec(**changes) -> RolloutSpec:
    plain = {"response_length": 48, "end_ids": (END,), "pad_id": END, "block_size": 4}
    return RolloutSpec(**plain | changes)


@cache
def guided(**changes):
    """All stale slots are poisoned before each forward, and rows share five slots."""
    model = with_poisoned_cache(MODEL)
    return make_guided(model, model, spec(slots=5, refill_rows=2, **changes))


@cache
def four_at_a_time():
    return guided()(*pair(), batch(12), EPSILON, KEY)


def equals_blocks_of_four(block_size: int) -> None:
    r = guided(block_size=block_size)(*pair(), batch(12), EPSILON, KEY)
    assert_same(r, four_at_a_time(), but=("counters",), atol=1e-5)
    assert 5 < int(r.corrected.sum()) < int(r.length.sum()) / 5


def test_s20_tokens_and_flags_are_the_same_for_every_block_size():
    equals_blocks_of_four(1)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [2, 8])
def test_s20_tokens_and_flags_are_the_same_for_more_block_sizes(block_size):
    equals_blocks_of_four(block_size)


def test_s10_cached_numbers_equal_those_of_a_cacheless_forward():
    """At every position of every row, for both models, with all stale slots poisoned."""
    prompts, r = batch(12), four_at_a_time()
    sequence = join(prompts, r.tokens)
    at = prompts.length[:, None] - 1 + jnp.arange(48)[None, :]
    for params, recorded in zip(pair(), (r.log_p, r.log_t), strict=True):
        hidden, _ = MODEL.forward(params, sequence, None, None)
        hidden = jnp.take_along_axis(hidden, at[:, :, None], axis=1)
        log_probs = jax.nn.log_softmax(MODEL.logits(params, hidden))
        expected = jnp.take_along_axis(log_probs, r.tokens[:, :, None], axis=2)[:, :, 0]
        expected = jnp.where(r.valid, expected, 0.0)
        np.testing.assert_allclose(recorded, expected, rtol=0, atol=1e-4)
    assert int(r.corrected.sum()) > 5
    assert int(r.length.max()) == 48


def test_s08_s09_rows_that_accept_different_prefixes_go_on_from_their_own_lengths():
    """After each wave both caches give the logits of a fresh forward over what was kept."""
    params, usable, lengths = pair(), [1, 3, 4], [5, 9, 6]
    rng = np.random.default_rng(1)
    prompts = prompts_of([rng.integers(4, 60, n).tolist() for n in lengths])
    start = jnp.zeros(3, jnp.int32)
    forward = jax.jit(MODEL.forward)
    caches = [forward(p, prompts.tokens, start, MODEL.init_cache(3, 24))[1] for p in params]
    rows, no = jnp.arange(3, dtype=jnp.int32), jnp.zeros(3, bool)
    slots = Slots(
        row=rows,
        sequence_id=rows,
        length=prompts.length - 1,
        pending=prompts.tokens[rows, prompts.length - 1],
        count=start,
        alive=~no,
        finished=no,
        nonfinite=no,
    )
    drafted = jax.jit(lambda c, s, k: draft(MODEL, params[0], c, s, KEY, k), static_argnums=2)
    verified = jax.jit(lambda c, s, z: verify(MODEL, params[1], c, s, z))
    texts = [prompts.tokens[b, :n].tolist() for b, n in enumerate(lengths)]
    for _ in range(3):
        caches[0], proposal, _ = drafted(caches[0], slots, 4)
        caches[1], _ = verified(caches[1], slots, proposal)
        # The last usable position is a correction to some other token.
        tokens = np.array(proposal.T)
        for b, n in enumerate(usable):
            tokens[b, n - 1] = (tokens[b, n - 1] + 1) % 60
            texts[b] += tokens[b, :n].tolist()
        block = Block({"tokens": jnp.asarray(tokens)}, jnp.array(usable), jnp.zeros((3, 4), bool))
        before = slots
        slots, kept = commit(slots, block, response_length=16, end_ids=())
        assert kept.tolist() == usable
        assert (slots.length - before.length).tolist() == usable
        assert slots.length.tolist() == [len(text) - 1 for text in texts]
        assert slots.pending.tolist() == [text[-1] for text in texts]
        logits_p, logits_t = (
            drafted(caches[0], slots, 1)[2],
            verified(caches[1], slots, proposal)[1],
        )
        whole = prompts_of(texts, width=24)
        for p, got in zip(params, (logits_p[0], logits_t[0]), strict=True):
            hidden, _ = forward(p, whole.tokens, None, None)
            fresh = MODEL.logits(p, hidden[rows, slots.length])
            np.testing.assert_allclose(got, fresh, rtol=0, atol=1e-4)


def test_s15_the_neighbours_and_the_place_of_a_row_do_not_matter():
    reverse = jax.tree.map(lambda x: x[::-1], batch(12))
    r = guided()(*pair(), reverse, EPSILON, KEY)
    assert responses(r) == responses(four_at_a_time())[::-1]
    strangers = batch(12, seed=1)
    mixed = jax.tree.map(lambda x, y: x.at[:4].set(y[:4]), batch(12), strangers)
    r = guided()(*pair(), mixed, EPSILON, KEY)
    assert responses(r)[4:] == responses(four_at_a_time())[4:]
    assert responses(r)[:4] != responses(four_at_a_time())[:4]


def test_j13_in_bfloat16_the_records_still_belong_to_one_computation():
    """The p of the test, of the residual and of the record cannot disagree: no second pass."""
    model = language_model(CONFIG, jnp.bfloat16)
    run = make_guided(model, model, spec(response_length=24))
    r = run(*pair(), batch(12), EPSILON, KEY)
    accepted = np.asarray(r.valid & ~r.corrected)
    ratio = np.exp(np.minimum(np.asarray(r.log_q - r.log_p), 0.0))
    np.testing.assert_allclose(np.asarray(r.accept_prob)[accepted], ratio[accepted], atol=1e-6)
    corrected = np.asarray(r.corrected)
    assert corrected.any()
    assert (np.asarray(r.log_q)[corrected] > np.asarray(r.log_p)[corrected]).all()
    assert (np.asarray(r.kl) <= EPSILON * (1 + 1e-5)).all()


def test_shared_prompts_narrow_prefills_and_refill_change_no_token():
    """Prompts of 2 to 40 tokens, two samples each, two prompts at a time, in 39 or 20 columns."""
    rng = np.random.default_rng(2)
    texts = [rng.integers(4, CONFIG.vocab_size, n).tolist() for n in (40, 3, 22, 19, 21, 2)] * 2
    prompts = prompts_of(texts, width=40)
    assert spec().prefill_widths(40) == (39, 20)
    few = guided(response_length=12, prefill_prompts=2)(*pair(), prompts, EPSILON, KEY)
    at_once = make_guided(MODEL, MODEL, spec(response_length=12, prefill_buckets=1))
    assert_same(few, at_once(*pair(), prompts, EPSILON, KEY), but=("counters",), atol=1e-5)
    assert int(few.counters.prefilled) == 6


@pytest.mark.parametrize("guided", [True, False])
def test_the_caches_are_donated_and_written_in_place(guided):
    """The compiled call reuses its argument's memory, and no instruction copies a cache."""
    models = (MODEL, MODEL) if guided else (MODEL,)
    wave = functools.partial(guided_wave, MODEL, MODEL, spec())
    if not guided:
        wave = functools.partial(student_wave, MODEL, Purpose.DRAFT)
    fields = {name: GUIDED_FIELDS[name] for name in GUIDED_FIELDS if name != "teacher_sample"}
    sizes, prompts = Sizes(slots=24, refill=6, prefill=8, compact=24), batch(48)
    state = allocate(models, spec(), fields if guided else STUDENT_FIELDS, prompts, sizes)
    run = functools.partial(advance, models, wave, spec(), sizes)
    params, queue = pair()[: len(models)], make_queue(prompts, 48)
    jitted = jax.jit(run, donate_argnums=0)
    compiled = jitted.lower(state, params, prompts, queue, KEY, jnp.float32(0.1)).compile()
    caches = jax.tree.leaves(state.caches)
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(x.nbytes for x in caches)
    shape = ",".join(map(str, caches[0].shape))
    text = compiled.as_text()
    assert f"f32[{shape}]" in text
    copies = [line for line in text.splitlines() if f"f32[{shape}]" in line and " copy(" in line]
    assert not copies


# --- on several devices ---------------------------------------------------------------------------


@cache
def reference(response_length: int, epsilon: float):
    run = make_rollout(MODEL, MODEL, spec(response_length=response_length))
    return run(*pair(), batch(16), epsilon, KEY)


def compare_with_one_device(shape, epsilons=(EPSILON, 0.0), **changes) -> None:
    """Two steps on a mesh: the tokens of one device, and nothing compiled for the second."""
    traces = []

    def logits(params, hidden):
        traces.append(1)
        return MODEL.logits(params, hidden)

    mesh = make_mesh(*shape)
    placed = [jax.device_put(p, param_shardings(mesh, CONFIG)) for p in pair()]
    counted = dataclasses.replace(MODEL, logits=logits)
    several_calls = spec(response_length=16, waves_per_call=4, **changes)
    run = make_rollout(counted, counted, several_calls, mesh)
    for epsilon in epsilons:
        r = run(*placed, batch(16), epsilon, KEY)
        assert_same(r, reference(16, epsilon), but=("counters",), atol=1e-5)
        assert len(r.tokens.sharding.device_set) == mesh.size
        before = len(traces)
        run(*placed, batch(16, seed=1), epsilon / 2, step_key(0, 2))
        assert len(traces) == before


def test_j05_j09_a_mesh_gives_the_tokens_of_one_device(eight_devices):
    compare_with_one_device((2, 2, 2), (EPSILON,), slots=8, compact=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (4, 2, 1), (2, 4, 1), (2, 2, 2)]
)
@pytest.mark.parametrize("slots", [0, 8])
def test_j09_any_mesh_gives_the_tokens_of_one_device(eight_devices, shape, slots):
    compare_with_one_device(shape, slots=slots)


def test_j06_five_prompts_on_eight_devices_are_five_rows_everywhere(eight_devices):
    heard = []
    mesh = make_mesh(8, 1, 1)
    placed = jax.device_put(pair()[0], param_shardings(mesh, CONFIG))
    run = make_generate(MODEL, spec(response_length=16), mesh)
    r = run(placed, batch(5), KEY, Purpose.EVALUATION, heard.append)
    alone = make_generate(MODEL, spec(response_length=16))
    assert_same(r, alone(pair()[0], batch(5), KEY, Purpose.EVALUATION), atol=1e-5)
    assert r.tokens.shape == (5, 16)
    assert heard[-1].rows_total == 5
    assert int(r.counters.committed) == int(r.length.sum())


def test_j09_draws_that_depend_on_the_layout_are_refused():
    with jax.threefry_partitionable(False), pytest.raises(RuntimeError, match="leave it on"):
        make_generate(MODEL, spec())(pair()[0], batch(2), KEY, Purpose.DRAFT)
