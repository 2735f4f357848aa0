"""The optimiser step on hand-made rollouts: normalisation, masks, skips, clipping."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from saki_jax.models.sharding import batch_sharding, make_mesh
from saki_jax.rollout.packing import Shape, pack
from saki_jax.train.baselines import METHODS
from saki_jax.train.examples import packed_examples
from saki_jax.train.losses import response_hidden, response_logprobs
from saki_jax.train.objective import Objective, Signals
from saki_jax.train.optimizer import make_optimizer
from saki_jax.train.state import init_state, make_rollout_copy
from saki_jax.train.update import make_update
from train_toys import KEY, bigram, make_rollout, two_way

V = 8
LOG_V = float(np.log(V))


def flat_params():
    """Every token has probability 1/V whatever came before."""
    return {"table": jnp.zeros((V, V), jnp.float32)}


def k1_rollout(losses, **options):
    """A rollout whose K1 token losses are `losses` under `flat_params`, ratio 1.

    With r = 1 the loss is -A = log pi - log T.
    """
    rng = np.random.default_rng(3)
    return make_rollout(
        [[1 + i % 3] * (1 + i % 2) for i in range(len(losses))],
        [rng.integers(0, V, len(row)).tolist() for row in losses],
        log_p=[[-LOG_V] * len(row) for row in losses],
        log_t=[[-LOG_V - x for x in row] for row in losses],
        **options,
    )


SGD = optax.sgd(1.0)
BIGRAM = bigram(V)
ONE_WEIGHT = two_way(np.array([[2.0]]))
build = functools.lru_cache(make_update)  # one program for tests that ask for the same one


def one_update(rollout, *, params=None, method="saki", optimizer=SGD, student=BIGRAM, **options):
    """(new state, stats) of one SGD(1) step."""
    update = build(student, METHODS[method], Objective(), optimizer, **options)
    return update(init_state(params or flat_params(), optimizer), rollout, KEY)


def test_r07_joint_normalisation_of_both_branches():
    # Three accepted tokens and one correction whose NLL is 2.
    nll = 2.0
    table = np.zeros((V, V), np.float32)
    rest = np.log((1 - np.exp(-nll)) / (V - 1))
    table[5] = rest
    table[5, 7] = -nll
    log_v = -LOG_V
    options = {"corrected": [[False, False, False, True]], "teacher_mode": [[0, 0, 0, 7]]}
    log_t = [log_v + 0.5, log_v - 2.0, log_v]

    def loss(extra_p, extra_t):
        rollout = make_rollout(
            [[1]],
            [[2, 3, 5, 6]],
            log_p=[[log_v, log_v, log_v, extra_p]],
            log_t=[[*log_t, extra_t]],
            **options,
        )
        return one_update(rollout, params={"table": jnp.asarray(table)})[1]

    stats = loss(-1.0, -2.0)
    np.testing.assert_allclose(stats["loss"], 0.875, rtol=1e-6)
    np.testing.assert_allclose(stats["loss_surrogate"], 1.5 / 4, rtol=1e-6)
    np.testing.assert_allclose(stats["loss_teacher_mode"], 2.0 / 4, rtol=1e-6)
    assert stats["num_valid"] == 4
    assert stats["teacher_mode_rate"] == 0.25
    # The correction's own log p and log T do not enter.
    assert loss(-30.0, 0.0)["loss"] == stats["loss"]
    assert loss(jnp.nan, -jnp.inf)["loss"] == stats["loss"]


def test_k1_part_is_exactly_zero_at_corrections():
    rollout = k1_rollout([[5.0, 3.0]], corrected=[[True, True]], teacher_mode=[[4, 2]])
    _, stats = one_update(rollout)
    assert stats["loss_surrogate"] == 0.0
    np.testing.assert_allclose(stats["loss"], LOG_V, rtol=1e-6)
    _, plain = one_update(rollout, method="trb")
    np.testing.assert_allclose(plain["loss"], 4.0, rtol=1e-5)
    assert plain["loss_teacher_mode"] == 0.0
    assert plain["teacher_mode_rate"] == 0.0


R08 = [[1.0, 3.0], [0.5] * 6]


def test_r08_token_mean_over_the_whole_batch():
    _, stats = one_update(k1_rollout(R08), tokens_per_micro_batch=1)
    np.testing.assert_allclose(stats["loss"], 0.875, rtol=1e-5)


def uneven_rollout(rows=8):
    rng = np.random.default_rng(0)
    lengths = [2, 7, 1, 5, 0, 3, 6, 4, 7, 1][:rows]
    corrected = [(rng.random(n) < 0.3).tolist() for n in lengths]
    mode = [rng.integers(0, V, n).tolist() for n in lengths]
    losses = [rng.normal(size=n).tolist() for n in lengths]
    return k1_rollout(losses, corrected=corrected, teacher_mode=mode, junk=np.nan)


def test_r08_every_cut_gives_the_same_loss_and_gradient():
    rollout = uneven_rollout()
    whole, stats = one_update(rollout)
    assert np.abs(whole.params["table"]).max() > 0.01
    for tokens in (1, 20, 40):
        state, other = one_update(rollout, tokens_per_micro_batch=tokens)
        np.testing.assert_allclose(other["loss"], stats["loss"], atol=1e-6)
        np.testing.assert_allclose(state.params["table"], whole.params["table"], atol=1e-6)


def test_r22_the_last_partial_micro_batch_loses_nothing():
    rollout = uneven_rollout(rows=7)
    whole, stats = one_update(rollout)
    state, other = one_update(rollout, tokens_per_micro_batch=16)
    np.testing.assert_allclose(other["loss"], stats["loss"], atol=1e-6)
    np.testing.assert_allclose(state.params["table"], whole.params["table"], atol=1e-6)
    assert other["num_valid"] == stats["num_valid"]


def test_r22_five_rows_of_equal_gradient_in_fours():
    # The same token gradient g everywhere: the mean is g, not 5/8 or 1/4 of it.
    rollout = weight_rollout(rows=5)
    for tokens in (1, 4, 5):
        state, _ = one_update(
            rollout, params=weight(), student=ONE_WEIGHT, tokens_per_micro_batch=tokens
        )
        np.testing.assert_allclose(state.params["w"], [-1.0], rtol=1e-6)


def weight():
    return {"w": jnp.zeros(1, jnp.float32)}


def weight_rollout(rows):
    """8 rows or fewer of one token, A = -1; with feature 2 the gradient of each loss is 1."""
    half = float(np.log(0.5))
    return make_rollout(
        [[0]] * rows, [[0]] * rows, log_p=[[half]] * rows, log_t=[[half - 1.0]] * rows
    )


def test_r10_step_size_does_not_shrink_with_accumulation():
    for tokens in (8, 4, 2, 1):
        state, _ = one_update(
            weight_rollout(rows=8),
            params=weight(),
            student=ONE_WEIGHT,
            tokens_per_micro_batch=tokens,
        )
        np.testing.assert_allclose(state.params["w"], [-1.0], rtol=1e-6)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_r09_any_number_of_devices(eight_devices, devices):
    losses = [[1.0, 3.0], [], [], [], [0.5] * 6, [], [], []]
    reference, _ = one_update(k1_rollout(losses, junk=np.nan))
    mesh = make_mesh(devices, 1, 1, devices=eight_devices[:devices])
    with jax.set_mesh(mesh):
        rollout = k1_rollout(losses, junk=np.nan)
        rollout = jax.tree.map(
            lambda x: jax.device_put(x, batch_sharding(mesh)) if x.ndim else x, rollout
        )
        for tokens in (1, 10_000):
            state, stats = one_update(rollout, tokens_per_micro_batch=tokens, shards=devices)
            np.testing.assert_allclose(stats["loss"], 0.875, rtol=1e-5)
            np.testing.assert_allclose(state.params["table"], reference.params["table"], atol=1e-6)


def test_r11_an_empty_batch_moves_nothing_and_is_counted():
    optimizer = make_optimizer(learning_rate=1e-3)
    params = {"table": jax.random.normal(KEY, (V, V))}
    rollout = k1_rollout([[], []], junk=np.nan, width=3)
    before = jax.device_get(init_state(params, optimizer))
    state, stats = one_update(rollout, params=params, optimizer=optimizer)
    assert stats["loss"] == 0.0
    assert stats["grad_norm"] == 0.0
    assert stats["applied"] == 0.0
    assert state.empty_batches == 1
    assert state.skipped_steps == 0
    assert state.step == 1
    for new, old in zip(
        jax.tree.leaves((state.params, state.opt_state)),
        jax.tree.leaves((before.params, before.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(new, old)


def test_r12_junk_behind_the_responses_changes_nothing():
    losses = [[1.0, -2.0, 0.5], [0.5]]
    clean, stats = one_update(k1_rollout(losses))
    for junk in (np.nan, -np.inf, np.inf, -201.0):
        state, other = one_update(k1_rollout(losses, junk=junk))
        assert other["loss"] == stats["loss"]
        np.testing.assert_array_equal(state.params["table"], clean.params["table"])
        assert np.isfinite(other["log_p_gap_max"])


@pytest.mark.parametrize("pad", [-100, -1, V, 10**6])
def test_j02_ids_outside_the_vocabulary_in_masked_slots(pad):
    losses = [[1.0, -2.0, 0.5], [0.5]]
    clean, stats = one_update(k1_rollout(losses))
    state, other = one_update(k1_rollout(losses, pad=pad))
    assert other["loss"] == stats["loss"]
    np.testing.assert_array_equal(state.params["table"], clean.params["table"])


def test_r13_the_end_token_is_trained_and_nothing_behind_it():
    # End id 4, then junk 3, 3 in the response that a wrong mask would include.
    rollout = make_rollout(
        [[1]],
        [[7, 6, 4]],
        log_p=[[-LOG_V] * 3],
        log_t=[[-LOG_V - 1.0] * 3],
        pad=3,
        width=5,
    )
    assert rollout.valid.tolist() == [[True, True, True, False, False]]
    state, stats = one_update(rollout)
    assert stats["num_valid"] == 3
    # Only the rows of the table from which a valid token was predicted have moved: 1, 7, 6.
    moved = np.abs(np.asarray(state.params["table"])).sum(1) > 0
    assert np.flatnonzero(moved).tolist() == [1, 6, 7]
    # log pi(end | 6) fell, as A = -1 asks.
    assert state.params["table"][6, 4] < 0


def examples_of(rollout, shape):
    """The rows in lines, and where their response tokens are predicted."""
    examples, _ = packed_examples(
        rollout,
        METHODS["saki"].route(rollout, KEY),
        Signals(log_p=rollout.log_p, log_t=rollout.log_t),
        jnp.ones(rollout.tokens.shape),
        shape,
    )
    return examples, pack(rollout.prompts, rollout.length, shape)


def test_r14_masks_and_logprobs_are_aligned():
    table = np.full((8, 8), np.log(0.5 / 7), np.float32)
    for previous, target, p in [(1, 2, 0.5), (2, 3, 0.25), (3, 4, 0.125), (4, 5, 0.5)]:
        table[previous] = np.log((1 - p) / 7)
        table[previous, target] = np.log(p)
    params = {"table": jnp.asarray(table)}
    rollout = make_rollout([[1, 2, 3], [3]], [[4, 5], [4]], pad=6)
    lines, packing = examples_of(rollout, Shape(passes=1, lines=1, width=8))
    examples = jax.tree.map(lambda x: x[0], lines)
    assert examples.sequence.tolist() == [[1, 2, 3, 4, 3, 0, 0, 0]]
    hidden, _ = BIGRAM.forward(params, examples.sequence, None, None, examples.segment)
    head = functools.partial(BIGRAM.logits, params)
    found, _ = response_logprobs(head, response_hidden(hidden, examples), examples, chunk=512)
    log_pi = packing.collect(found[None], packing.response_slots(2))
    np.testing.assert_allclose(log_pi[0], [-2.07944, -0.69315], atol=1e-5)
    np.testing.assert_allclose(log_pi[1, 0], -2.07944, atol=1e-5)
    assert rollout.valid.sum() == examples.routed.valid.sum() == 3


def test_r15_sequences_have_no_gap_and_masks_follow_the_rows_own_prompt():
    rollout = make_rollout([[1, 2, 3], [1, 2, 3, 4, 5]], [[7, 6], [7, 6]], pad=3)
    lines, _ = examples_of(rollout, Shape(passes=1, lines=1, width=11))
    assert lines.sequence.tolist() == [[[1, 2, 3, 4, 5, 7, 1, 2, 3, 7, 0]]]
    assert lines.segment.tolist() == [[[1] * 6 + [2] * 4 + [0]]]
    assert lines.tokens.tolist() == [[[0, 0, 0, 0, 7, 6, 0, 0, 7, 6, 0]]]
    state, _ = one_update(rollout.replace(log_t=rollout.log_p - 1.0))
    moved = np.abs(np.asarray(state.params["table"])).sum(1) > 0
    # Predictions were made from the last prompt token (3 and 5) and from 7, nowhere else.
    assert np.flatnonzero(moved).tolist() == [3, 5, 7]


def test_r24_rows_without_tokens_do_not_enter_the_denominator():
    _, stats = one_update(k1_rollout([[1.0, 1.0], [2.0], []], width=2))
    np.testing.assert_allclose(stats["loss"], 4 / 3, rtol=1e-5)


def test_rows_of_a_model_that_went_wrong_are_left_out():
    losses = [[1.0, 1.0], [2.0, 7.0, 9.0]]
    kept, stats = one_update(k1_rollout(losses[:1]))
    state, other = one_update(k1_rollout(losses, nonfinite=[False, True]))
    assert other["num_valid"] == 2
    np.testing.assert_allclose(other["loss"], stats["loss"], rtol=1e-6)
    np.testing.assert_allclose(state.params["table"], kept.params["table"], atol=1e-7)
    state, _ = one_update(k1_rollout(losses, nonfinite=[True, True]))
    assert (state.empty_batches, state.skipped_in_row) == (1, 1)


def test_r19_a_nan_gradient_skips_the_step_and_is_counted():
    optimizer = make_optimizer(learning_rate=1e-2)
    params = {"table": jnp.zeros((V, V)).at[7, 2].set(jnp.nan)}
    update = make_update(BIGRAM, METHODS["saki"], Objective(), optimizer)
    bad = make_rollout([[1]], [[7, 2]], log_p=[[-LOG_V] * 2], log_t=[[-3.0] * 2])
    good = make_rollout([[1]], [[2, 3]], log_p=[[-LOG_V] * 2], log_t=[[-3.0] * 2])
    state = init_state(params, optimizer)
    before = jax.device_get(state)
    for times in (1, 2):
        state, stats = update(state, bad, KEY)
        assert stats["applied"] == 0.0
        assert (state.skipped_steps, state.skipped_in_row) == (times, times)
        for new, old in zip(
            jax.tree.leaves((state.params, state.opt_state)),
            jax.tree.leaves((before.params, before.opt_state)),
            strict=True,
        ):
            np.testing.assert_array_equal(new, old)
    state, stats = update(state, good, KEY)
    assert stats["applied"] == 1.0
    assert (state.step, state.skipped_steps, state.skipped_in_row) == (3, 2, 0)
    assert optax.tree.get(state.opt_state, "count") == 1


def test_r23_one_clip_after_all_micro_batches_and_the_norm_from_before_it():
    # Token gradients [3, 4] and [0, -1]: their mean is [1.5, 1.5].
    student = two_way(np.array([[6.0, 8.0], [0.0, -2.0]]))
    half = float(np.log(0.5))
    rollout = make_rollout([[0], [1]], [[0], [0]], log_p=[[half]] * 2, log_t=[[half - 1.0]] * 2)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    for tokens in (1, 2):
        state, stats = one_update(
            rollout,
            params={"w": jnp.zeros(2, jnp.float32)},
            student=student,
            optimizer=optimizer,
            tokens_per_micro_batch=tokens,
        )
        np.testing.assert_allclose(-state.params["w"], [0.70711, 0.70711], atol=1e-5)
        np.testing.assert_allclose(stats["grad_norm"], 2.12132, atol=1e-5)


def test_advantage_from_the_rollout_ignores_the_trainers_own_logprob():
    # The trainer disagrees with the rollout by 0.1: A = log T - log p in one setting only.
    rollout = make_rollout([[1]], [[2]], log_p=[[-LOG_V - 0.1]], log_t=[[-LOG_V - 1.0]])
    means = {}
    for source in ("current", "rollout"):
        objective = Objective(advantage_logp=source)
        update = make_update(BIGRAM, METHODS["opd"], objective, SGD)
        _, stats = update(init_state(flat_params(), SGD), rollout, KEY)
        means[source] = float(stats["advantage_mean"])
        np.testing.assert_allclose(stats["log_p_gap_mean"], 0.1, atol=1e-6)
    np.testing.assert_allclose(means["current"], -1.0, atol=1e-6)
    np.testing.assert_allclose(means["rollout"], -0.9, atol=1e-6)


def test_j11_copies_survive_the_donation_of_the_state():
    optimizer = make_optimizer(learning_rate=1e-3)
    params = flat_params()
    state = init_state(params, optimizer)
    copy = make_rollout_copy(jnp.float32)(state.params)
    kept = np.asarray(copy["table"]).copy()
    update = make_update(BIGRAM, METHODS["saki"], Objective(), optimizer)
    new, _ = update(state, k1_rollout([[1.0]]), KEY)
    assert state.params["table"].is_deleted()
    np.testing.assert_array_equal(copy["table"], kept)
    np.testing.assert_array_equal(params["table"], 0.0)
    assert np.abs(new.params["table"]).max() > 0


def test_j05_one_trace_whatever_the_rows_look_like():
    traces = []
    model = BIGRAM

    def forward(params, tokens, start, cache, segment_ids=None):
        traces.append(tokens.shape)
        return model.forward(params, tokens, start, cache, segment_ids)

    optimizer = optax.sgd(1.0)
    student = type(model)(V, model.init_cache, forward, model.logits)
    update = make_update(student, METHODS["saki"], Objective(), optimizer, tokens_per_micro_batch=1)
    state = init_state(flat_params(), optimizer)
    state, _ = update(state, k1_rollout([[1.0, 2.0], [1.0]], width=4), KEY)
    traced = len(traces)
    for losses in ([[1.0], [0.5] * 2], [[], [2.0] * 2], [[1.0] * 4] * 2, [[], []]):
        state, _ = update(state, k1_rollout(losses, width=4), KEY)
    assert len(traces) == traced
