"""The update on packed lines against the same update on rows one by one, on a small Qwen3."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from saki_jax.models.config import Qwen3Config
from saki_jax.models.qwen3 import init_params, language_model
from saki_jax.models.sharding import batch_sharding, make_mesh, param_shardings
from saki_jax.rollout.packing import join
from saki_jax.train.baselines import METHODS
from saki_jax.train.objective import Objective, Signals, masked_nll, surrogate
from saki_jax.train.state import init_state
from saki_jax.train.update import make_update
from train_toys import KEY, make_rollout

CONFIG = Qwen3Config(
    vocab_size=38,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    initializer_range=0.3,
    tie_word_embeddings=False,
)
MODEL = language_model(CONFIG)
SGD = optax.sgd(1.0)
LENGTHS = [3, 12, 1, 7, 0, 5, 9, 2]
PROMPTS = [2, 5, 4, 1, 3, 5, 2, 4]


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(1))


def random_rollout(lengths=LENGTHS, prompts=PROMPTS, width=12, **options):
    """A rollout on random tokens, with junk behind every end."""
    rng = np.random.default_rng(5)
    draw = lambda size: rng.integers(0, CONFIG.vocab_size, size).tolist()  # noqa: E731
    near = lambda n: (-3.5 + 0.5 * rng.normal(size=n)).tolist()  # noqa: E731
    return make_rollout(
        [draw(n) for n in prompts],
        [draw(n) for n in lengths],
        log_p=[near(n) for n in lengths],
        log_t=[near(n) for n in lengths],
        corrected=[(rng.random(n) < 0.3).tolist() for n in lengths],
        teacher_mode=[draw(n) for n in lengths],
        junk=np.nan,
        pad=10**6,
        width=width,
        **options,
    )


@functools.cache
def packed(tokens, shards=1, method="saki", chunk=512):
    return make_update(
        MODEL, METHODS[method], Objective(), SGD,
        tokens_per_micro_batch=tokens, shards=shards, chunk=chunk,
    )  # fmt: skip


@jax.jit
def row_by_row(params, rollout):
    """(loss, gradient) as METHODS section 3 has it, every row alone and all logits in memory."""
    routed = METHODS["saki"].route(rollout, KEY)
    signals = Signals(rollout.log_p, rollout.log_t)

    def loss(params):
        sequence = join(rollout.prompts, jnp.where(routed.valid, rollout.tokens, 0))
        hidden, _ = MODEL.forward(params, sequence, None, None)
        at = rollout.prompts.length[:, None] - 1 + jnp.arange(rollout.tokens.shape[1])[None, :]
        hidden = jnp.take_along_axis(hidden, at[:, :, None], axis=1)
        log_pi = jax.nn.log_softmax(MODEL.logits(params, hidden))
        pick = lambda ids: jnp.take_along_axis(  # noqa: E731
            log_pi, jnp.where(routed.valid, ids, 0)[:, :, None], axis=2
        )[:, :, 0]
        own = pick(rollout.tokens)
        free = routed.valid & ~routed.distilled
        advantage, _ = METHODS["saki"].advantage(own, signals, Objective())
        terms = surrogate(own, rollout.log_p, advantage, free, Objective().clips)
        total = terms.loss.sum() + masked_nll(pick(routed.target), routed.distilled).sum()
        return total / routed.valid.sum()

    return jax.value_and_grad(loss)(params)


def assert_same(state, stats, params, expected):
    loss, grads = expected
    np.testing.assert_allclose(stats["loss"], loss, rtol=1e-5)
    for new, old, grad in zip(
        *map(jax.tree.leaves, (state.params, params, grads)), strict=True
    ):  # fmt: skip
        scale = float(jnp.abs(grad).max())
        np.testing.assert_allclose(new - old, -grad, atol=2e-5 * max(scale, 1.0))


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 512), (64, 3), (10_000, 8)])
def test_any_budget_gives_the_loss_and_gradient_of_single_rows(params, tokens, chunk):
    rollout = random_rollout()
    state, stats = packed(tokens, chunk=chunk)(init_state(params, SGD), rollout, KEY)
    assert stats["num_valid"] == sum(LENGTHS)
    assert_same(state, stats, params, row_by_row(params, rollout))


def test_the_order_of_the_rows_does_not_matter(params):
    rollout = random_rollout()
    expected = row_by_row(params, rollout)
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(len(LENGTHS))
        shuffled = jax.tree.map(lambda x, o=order: x[o] if x.ndim else x, rollout)
        state, stats = packed(64)(init_state(params, SGD), shuffled, KEY)
        assert_same(state, stats, params, expected)


@pytest.mark.parametrize(("mesh", "tokens"), [((8, 1, 1), 1), ((2, 2, 2), 200)])
def test_eight_devices_give_the_update_of_single_rows(params, eight_devices, mesh, tokens):
    rollout = random_rollout(LENGTHS * 2, PROMPTS * 2)
    expected = row_by_row(params, rollout)
    mesh = make_mesh(*mesh, devices=eight_devices)
    with jax.set_mesh(mesh):
        spread = jax.tree.map(
            lambda x: jax.device_put(x, batch_sharding(mesh)) if x.ndim else x, rollout
        )
        laid = jax.device_put(params, param_shardings(mesh, CONFIG))
        shards = mesh.shape["data"] * mesh.shape["fsdp"]
        state, stats = packed(tokens, shards)(init_state(laid, SGD), spread, KEY)
    assert_same(*jax.device_get((state, stats)), params, jax.device_get(expected))


def test_rows_that_went_wrong_are_not_fed(params):
    """Two flagged rows read a token whose embedding is NaN; nothing of it reaches the others."""
    flags = np.array([i in (1, 6) for i in range(len(LENGTHS))])
    rollout = random_rollout(nonfinite=flags.tolist())
    poison = 7
    others = lambda ids: jnp.where(ids == poison, 8, ids)  # noqa: E731
    rollout = rollout.replace(
        tokens=jnp.where(flags[:, None], poison, others(rollout.tokens)),
        prompts=rollout.prompts.replace(tokens=others(rollout.prompts.tokens)),
    )
    table = params["embed_tokens"]["embedding"].at[poison].set(jnp.nan)
    poisoned = params | {"embed_tokens": {"embedding": table}}
    state, stats = packed(64)(init_state(poisoned, SGD), rollout, KEY)
    assert stats["applied"] == 1.0
    assert stats["num_valid"] == sum(np.array(LENGTHS)[~flags])
    expected, _ = packed(64)(init_state(params, SGD), rollout, KEY)
    for new, old in zip(
        jax.tree.leaves(state.params["layers"]), jax.tree.leaves(expected.params["layers"]),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(new, old)


def test_an_empty_batch_makes_no_pass(params):
    rollout = random_rollout([0] * 8)
    state, stats = packed(64)(init_state(params, SGD), rollout, KEY)
    assert stats["loss"] == 0.0
    assert stats["grad_norm"] == 0.0
    assert stats["applied"] == 0.0
    assert state.empty_batches == 1


def test_one_compiled_program_whatever_the_lengths(params):
    update = make_update(MODEL, METHODS["saki"], Objective(), SGD, tokens_per_micro_batch=64)
    state = init_state(params, SGD)
    for lengths in (LENGTHS, LENGTHS[::-1], [12] * 8, [0] * 8, [1] * 8):
        state, _ = update(state, random_rollout(lengths), KEY)
    assert update._cache_size() == 1


def shapes_in(jaxpr):
    """Shapes of all intermediate results, those of loops and branches included."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield variable.aval.shape
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from shapes_in(inner)


def test_logits_exist_for_a_chunk_of_positions_only(params):
    update = packed(64, chunk=8)
    traced = jax.make_jaxpr(update)(init_state(params, SGD), random_rollout(), KEY)
    with_vocabulary = [s for s in shapes_in(traced.jaxpr) if s and s[-1] == CONFIG.vocab_size]
    # The head itself is [D, V]; everything else holds one chunk.
    sizes = {int(np.prod(s[:-1])) for s in with_vocabulary if s[0] != CONFIG.hidden_size}
    assert max(sizes) == 8
