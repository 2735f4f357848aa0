"""Chunked log-probabilities: the values, the chunks, the gradient, the mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.models.config import Qwen3Config
from saki_jax.models.qwen3 import init_params, language_model
from saki_jax.models.token_logprobs import token_logprobs

V_QWEN = 151_936


def _case(rows=3, length=7, width=5, vocab=11, targets=2, seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(rows, length, width)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(width, vocab)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, vocab, (rows, length, targets)), jnp.int32)
    return hidden, head, ids


def _plain(hidden, head, ids):
    """The definition, with [B, T, V] in memory, float64."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    entropy = -(np.exp(log_p) * log_p).sum(-1)
    return np.take_along_axis(log_p, np.asarray(ids), -1), entropy


@pytest.mark.parametrize("chunk", [1, 3, 6, 9, 21, 512])
def test_every_chunk_size_gives_the_definition(chunk):
    hidden, head, ids = _case()
    ours, entropy = token_logprobs(lambda h: h @ head, hidden, ids, chunk=chunk)
    expected, expected_entropy = _plain(hidden, head, ids)
    assert ours.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    np.testing.assert_allclose(entropy, expected_entropy, atol=1e-5)


@pytest.mark.parametrize("chunk", [3, 8])
def test_gradient_reaches_hidden_and_head_and_equals_the_unchunked_one(chunk):
    hidden, head, ids = _case()
    weight = jnp.asarray(np.random.default_rng(1).normal(size=ids.shape), jnp.float32)

    def loss(hidden, head, chunk):
        return jnp.sum(weight * token_logprobs(lambda h: h @ head, hidden, ids, chunk=chunk)[0])

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    for ours, whole in zip(gradient(hidden, head, chunk), gradient(hidden, head, 512), strict=True):
        assert jnp.abs(whole).max() > 0.1
        np.testing.assert_allclose(ours, whole, atol=1e-5)


def test_no_array_of_all_positions_by_the_vocabulary_exists_even_in_the_gradient():
    hidden, head, ids = _case(rows=2, length=40, vocab=97)

    def loss(hidden, head):
        return token_logprobs(lambda h: h @ head, hidden, ids, chunk=10)[0].sum()

    largest = _largest_with_axis(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(hidden, head), 97)
    assert largest == 10 * 97  # and not 80 * 97
    unchunked = jax.make_jaxpr(lambda h: (h @ head).sum())(hidden)
    assert _largest_with_axis(unchunked, 97) == 80 * 97  # the search does see one


def _largest_with_axis(jaxpr, size: int) -> int:
    """Elements of the largest intermediate that has an axis of this size."""
    found = 0
    for equation in jaxpr.eqns if hasattr(jaxpr, "eqns") else jaxpr.jaxpr.eqns:
        for variable in equation.outvars:
            if size in variable.aval.shape:
                found = max(found, int(np.prod(variable.aval.shape)))
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                found = max(found, _largest_with_axis(inner, size))
    return found


@pytest.mark.parametrize("foreign", [-100, -1, 11, 10**6])
def test_j02_masked_labels_may_hold_any_id(foreign):
    hidden, head, ids = _case()
    mask = jnp.arange(7)[None, :, None] < jnp.array([7, 4, 2])[:, None, None]

    def loss(hidden, head, labels):
        log_p, _ = token_logprobs(lambda h: h @ head, hidden, labels, chunk=6)
        return jnp.sum(jnp.where(mask, log_p, 0.0))

    both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    value, grads = both(hidden, head, jnp.where(mask, ids, foreign))
    expected, expected_grads = both(hidden, head, jnp.where(mask, ids, 0))
    assert value == expected
    for ours, theirs in zip(grads, expected_grads, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_masked_vocabulary_rows_have_no_probability_and_spoil_no_gradient():
    hidden, head, ids = _case(vocab=11)
    ids = ids % 8

    def narrow(h):
        return (h @ head).at[..., 8:].set(-jnp.inf)

    ours, entropy = token_logprobs(narrow, hidden, ids, chunk=6)
    expected, expected_entropy = _plain(hidden, head[:, :8], ids)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    np.testing.assert_allclose(entropy, expected_entropy, atol=1e-5)
    gradient = jax.grad(lambda h: token_logprobs(narrow, h, ids, chunk=6)[0].sum())(hidden)
    assert jnp.isfinite(gradient).all()


def test_q09_bfloat16_logits_are_reduced_in_float32():
    z = 3 * jax.random.normal(jax.random.key(5), (4, V_QWEN))
    ids = jnp.array([5, 6, 7, 8]).reshape(1, 4, 1)
    rows = jnp.arange(4.0).reshape(1, 4, 1)  # "hidden" is only the row's number
    exact = np.array([-15.05788, -17.95005, -15.41442, -20.52162])

    def logits_of(table):
        return lambda h: table[h[..., 0].astype(jnp.int32)]

    ours, _ = token_logprobs(logits_of(z), rows, ids, chunk=1)
    np.testing.assert_allclose(ours[0, :, 0], exact, atol=1e-4)
    half, _ = token_logprobs(logits_of(z.astype(jnp.bfloat16)), rows, ids, chunk=1)
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half[0, :, 0], [-15.0576, -17.9488, -15.4145, -20.5304], atol=1e-3)
    assert np.abs(np.asarray(half[0, :, 0]) - exact).max() < 0.02


def test_q16_the_reduction_does_not_follow_the_precision_flag():
    z = 3 * jax.random.normal(jax.random.key(5), (1, 2, 1001))
    ids = jnp.zeros((1, 2, 1), jnp.int32)
    with jax.default_matmul_precision("highest"):
        exact = token_logprobs(lambda h: h, z, ids)
    with jax.default_matmul_precision("bfloat16"):
        ours = token_logprobs(lambda h: h, z, ids)
    for one, other in zip(ours, exact, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_whole_qwen_vocabulary_chunked_equals_unchunked_with_gradient():
    rng = np.random.default_rng(3)
    hidden = jnp.asarray(rng.normal(size=(2, 6, 8)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(V_QWEN, 8)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, V_QWEN, (2, 6, 1)), jnp.int32).at[0, 0, 0].set(V_QWEN - 1)

    def loss(head, chunk):
        log_p, entropy = token_logprobs(lambda h: h @ head.T, hidden, ids, chunk=chunk)
        return log_p.sum(), (log_p, entropy)

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    (chunked, (log_p, entropy)), (whole, (log_p_whole, entropy_whole)) = (
        run(head, 4),
        run(head, 512),
    )
    np.testing.assert_allclose(log_p, log_p_whole, atol=1e-5)
    np.testing.assert_allclose(entropy, entropy_whole, atol=1e-5)
    np.testing.assert_allclose(chunked, whole, atol=1e-5)
    np.testing.assert_allclose(log_p, _plain(hidden, head.T, ids)[0], atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_real_head_at_the_whole_vocabulary_in_either_dtype(dtype):
    config = Qwen3Config(V_QWEN, 16, 16, 1, 2, 1, 8, initializer_range=0.5)
    lm = language_model(config, dtype)
    params = jax.tree.map(lambda x: x.astype(dtype), init_params(config, jax.random.key(0)))
    tokens = jnp.array([[3, V_QWEN - 1, 77, 100_000]])
    ids = jnp.stack([tokens, jnp.full_like(tokens, V_QWEN - 1)], axis=-1)

    @jax.jit
    def run(params):
        hidden, _ = lm.forward(params, tokens, None, None)
        few = token_logprobs(lambda h: lm.logits(params, h), hidden, ids, chunk=2)
        return lm.logits(params, hidden), *few

    logits, log_p, entropy = run(params)
    assert logits.dtype == log_p.dtype == entropy.dtype == jnp.float32
    exact = np.asarray(logits, np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(log_p, np.take_along_axis(exact, np.asarray(ids), -1), atol=2e-5)
    np.testing.assert_allclose(entropy, -(np.exp(exact) * exact).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 6, 9, 512])
def test_only_wanted_positions_are_computed(chunk):
    hidden, head, ids = _case(rows=3, length=9)
    wanted = np.zeros((3, 9), bool)
    wanted[0, [2, 3, 8]] = wanted[2, [0, 5]] = True
    wanted = jnp.asarray(wanted)

    def loss(hidden, head, wanted):
        found, entropy = token_logprobs(lambda h: h @ head, hidden, ids, wanted=wanted, chunk=chunk)
        return found.sum(), (found, entropy)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (by_hidden, by_head), (found, entropy) = gradient(hidden, head, wanted)
    expected, expected_entropy = _plain(hidden, head, ids)
    np.testing.assert_allclose(found, np.where(wanted[:, :, None], expected, 0), atol=1e-5)
    np.testing.assert_allclose(entropy, np.where(wanted, expected_entropy, 0), atol=1e-5)
    masked = lambda hidden, head: (  # noqa: E731
        token_logprobs(lambda h: h @ head, hidden, ids)[0] * wanted[:, :, None]
    ).sum()
    for ours, plain in zip(
        (by_hidden, by_head), jax.grad(masked, argnums=(0, 1))(hidden, head), strict=True
    ):
        np.testing.assert_allclose(ours, plain, atol=1e-5)
    # Chunks without a wanted position are skipped: no position wanted, no gradient at all.
    (by_hidden, by_head), _ = gradient(hidden, head, jnp.zeros_like(wanted))
    assert not by_hidden.any()
    assert not by_head.any()
