"""The module: head, padding, causality, dtypes, parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qwen3_checks import jitted
from saki_jax.models.config import PRESETS, Qwen3Config
from saki_jax.models.parameters import describe
from saki_jax.models.qwen3 import default_compute_dtype, init_params, language_model

TINY = PRESETS["tiny"]


@pytest.fixture(scope="module")
def model():
    return jitted(language_model(TINY, jnp.float32)), init_params(TINY, jax.random.key(0))


def _tokens(rows: int, length: int, seed: int = 1) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (rows, length), 0, TINY.vocab_size)


def _two_wide(tied: bool) -> Qwen3Config:
    return Qwen3Config(3, 2, 4, 1, 1, 1, 2, tie_word_embeddings=tied)


def _with_head(tied: bool, embedding: list, head: list | None) -> tuple:
    config = _two_wide(tied)
    params = init_params(config, jax.random.key(0))
    params["embed_tokens"]["embedding"] = jnp.array(embedding, jnp.float32)
    if head is not None:
        params["lm_head"]["kernel"] = jnp.array(head, jnp.float32).T
    return language_model(config, jnp.float32), params


@pytest.mark.parametrize(("tied", "logits"), [(True, [3, 5, 8]), (False, [6, 10, 2])])
def test_q07_tied_and_untied_head(tied, logits):
    head = None if tied else [[2, 0], [0, 2], [-1, 1]]
    lm, params = _with_head(tied, [[1, 0], [0, 1], [1, 1]], head)
    np.testing.assert_allclose(lm.logits(params, jnp.array([3.0, 5.0])), logits)
    assert ("lm_head" in params) == (not tied)


def test_w01_tied_head_is_the_embedding_itself():
    lm, params = _with_head(True, [[1, 2], [3, 4], [5, 6]], None)
    np.testing.assert_allclose(lm.logits(params, jnp.array([1.0, -1.0])), [-1, -1, -1])
    # One array in the parameters, one in each moment of the optimizer.
    moments = optax.adam(1e-3).init(params)[0].mu
    for tree in (params, moments):
        assert sum(leaf.shape == (3, 2) for leaf in jax.tree.leaves(tree)) == 1


def test_w01_gradient_of_the_tied_matrix_is_the_sum_of_both_uses():
    tokens = jnp.array([[0, 2, 1]])
    tied, params = _with_head(True, [[1, 2], [3, 4], [5, 6]], None)
    untied, apart = _with_head(False, [[1, 2], [3, 4], [5, 6]], [[1, 2], [3, 4], [5, 6]])
    for name in ("layers", "norm"):
        apart[name] = params[name]

    def loss(lm, params):
        logits = lm.logits(params, lm.forward(params, tokens, None, None)[0])
        return jnp.sum(jnp.sin(logits))

    both = jax.jit(jax.grad(lambda p: loss(tied, p)))(params)["embed_tokens"]["embedding"]
    each = jax.jit(jax.grad(lambda p: loss(untied, p)))(apart)
    total = each["embed_tokens"]["embedding"] + each["lm_head"]["kernel"].T
    np.testing.assert_allclose(both, total, rtol=1e-4, atol=1e-5)
    assert jnp.abs(each["embed_tokens"]["embedding"]).max() > 0.01


def test_q08_each_row_of_a_ragged_batch_equals_the_row_alone(model):
    lm, params = model
    tokens, lengths = _tokens(2, 12), [3, 7]
    padded = tokens.at[0, 3:7].set(0)[:, :7]
    hidden, cache = lm.forward(params, padded, jnp.zeros(2, int), lm.init_cache(2, 12))
    start = jnp.array(lengths)
    steps = []
    for step in range(5):
        fed = jnp.stack([tokens[row, length + step] for row, length in enumerate(lengths)])
        out, cache = lm.forward(params, fed[:, None], start + step, cache)
        steps.append(lm.logits(params, out[:, 0]))
    for row, length in enumerate(lengths):
        alone, _ = lm.forward(params, tokens[row : row + 1, : length + 5], None, None)
        alone = lm.logits(params, alone[0])
        np.testing.assert_allclose(
            lm.logits(params, hidden[row, :length]), alone[:length], atol=1e-4
        )
        for step in range(5):
            np.testing.assert_allclose(steps[step][row], alone[length + step], atol=1e-4)


def test_j03_a_row_of_padding_disturbs_nobody(model):
    lm, params = model
    tokens = jnp.concatenate([_tokens(2, 6), jnp.full((1, 6), -100)])

    def loss(params, tokens, weight):
        logits = lm.logits(params, lm.forward(params, tokens, None, None)[0])
        return jnp.sum(jnp.where(weight[:, None, None] > 0, jnp.sin(logits), 0.0))

    gradient = jax.jit(jax.value_and_grad(loss))
    with jax.debug_nans(True):
        value, grads = gradient(params, tokens, jnp.array([1.0, 1.0, 0.0]))
    alone, alone_grads = gradient(params, tokens[:2], jnp.ones(2))
    assert value == pytest.approx(float(alone), abs=1e-5)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(alone_grads), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_gradient_of_the_future_is_exactly_zero(model):
    lm, params = model
    table = params["embed_tokens"]["embedding"]
    tokens = jnp.array([[1, 2, 3, 4, 5]])

    def early(table):
        changed = params | {"embed_tokens": {"embedding": table}}
        return jnp.sum(lm.forward(changed, tokens, None, None)[0][:, :3] ** 2)

    grads = jax.jit(jax.grad(early))(table)
    assert (grads[4:6] == 0).all()
    assert (jnp.abs(grads[1:4]).max(axis=1) > 0).all()


@pytest.mark.parametrize("split", [[11], [5, 6], [4, 1, 3, 3], [1] * 11])
def test_any_schedule_of_cached_feeding_equals_one_forward(model, split):
    lm, params = model
    tokens = _tokens(2, 11)
    whole, none = lm.forward(params, tokens, None, None)
    assert none is None
    cache, parts, at = lm.init_cache(2, 16), [], 0
    for count in split:
        start = jnp.full(2, at)
        out, cache = lm.forward(params, tokens[:, at : at + count], start, cache)
        parts.append(out)
        at += count
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=1e-5)


def test_remat_gives_the_same_gradient_from_fewer_residuals(model):
    lm, params = model
    again = jitted(language_model(TINY, jnp.float32, remat=True))
    tokens = _tokens(2, 9)

    def gradient(lm):
        def loss(p):
            return jnp.sum(jnp.sin(lm.logits(p, lm.forward(p, tokens, None, None)[0])))

        return jax.jit(jax.grad(loss))

    for ours, theirs in zip(
        jax.tree.leaves(gradient(lm)(params)), jax.tree.leaves(gradient(again)(params)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    # The two sides really differ: only one recomputes.
    assert "remat" in str(jax.make_jaxpr(gradient(again))(params))
    assert "remat" not in str(jax.make_jaxpr(gradient(lm))(params))


def test_compute_dtype_follows_the_backend_and_logits_are_float32():
    assert default_compute_dtype() == jnp.float32  # the tests run on CPU
    lm, params = jitted(language_model(TINY, jnp.bfloat16)), init_params(TINY, jax.random.key(0))
    hidden, _ = lm.forward(params, _tokens(1, 3), None, None)
    assert hidden.dtype == jnp.bfloat16
    assert lm.logits(params, hidden).dtype == jnp.float32


def test_a_cast_copy_computes_what_the_masters_compute():
    lm, params = jitted(language_model(TINY, jnp.bfloat16)), init_params(TINY, jax.random.key(0))
    copy = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    ours, theirs = (lm.forward(p, _tokens(2, 5), None, None)[0] for p in (copy, params))
    np.testing.assert_allclose(
        np.asarray(ours, np.float32), np.asarray(theirs, np.float32), atol=2**-6
    )


def test_parameters_are_float32_of_the_described_shapes():
    config = PRESETS["tiny"]
    params = init_params(config, jax.random.key(0))
    leaves = {
        tuple(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    assert leaves.keys() == {p.path for p in describe(config)}
    for parameter in describe(config):
        leaf = leaves[parameter.path]
        assert leaf.dtype == jnp.float32
        assert leaf.shape == parameter.shape
        spread = 0.0 if leaf.ndim == 1 else config.initializer_range
        assert float(leaf.std()) == pytest.approx(spread, rel=0.1)
    first, second = (leaves["layers", layer, "mlp", "up_proj", "kernel"] for layer in "01")
    assert not (first == second).any()


def test_j11_the_tied_tree_can_be_donated(model):
    lm, _ = model
    params = init_params(TINY, jax.random.key(3))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)]
    assert len(set(pointers)) == len(pointers)
    update = jax.jit(lambda p: jax.tree.map(lambda x: x * 0.5, p), donate_argnums=0)
    new = update(params)
    assert params["norm"]["scale"].is_deleted()  # CPU enforces donation too
    assert jnp.isfinite(lm.forward(new, _tokens(1, 4), None, None)[0]).all()
