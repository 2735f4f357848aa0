"""Ids beyond the tokenizer, masked: no mass, no draw, no gradient, and nothing that is NaN."""

import jax
import jax.numpy as jnp
import numpy as np

from saki_jax.models.token_logprobs import token_logprobs
from saki_jax.models.unused_rows import mask_unused_rows
from saki_jax.rollout import bridge, coupling
from saki_jax.train.forward_kl import kl
from train_toys import bigram

WIDTH, USED = 12, 9
MODEL = mask_unused_rows(bigram(WIDTH), USED)


def logits(seed: int, scale: float = 2.0) -> np.ndarray:
    """[50, V]; what is masked would be likely."""
    found = scale * np.random.default_rng(seed).normal(size=(50, WIDTH))
    found[:, USED:] += 3.0
    return found.astype(np.float32)


def masked(seed: int) -> jax.Array:
    return MODEL.logits({}, jnp.asarray(logits(seed)))


def test_the_others_share_the_mass_and_equal_calls_are_one_model():
    log_p = jax.nn.log_softmax(masked(0))
    np.testing.assert_allclose(
        log_p[:, :USED], jax.nn.log_softmax(logits(0)[:, :USED]), rtol=1e-5, atol=1e-6
    )
    assert (log_p[:, USED:] == -jnp.inf).all()
    model = bigram(WIDTH)
    assert mask_unused_rows(model, USED) is mask_unused_rows(model, USED)
    assert MODEL.vocab_size == WIDTH


def test_log_probabilities_entropy_and_gradients_are_those_of_the_narrow_head():
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 4)), jnp.float32)
    weight = jnp.asarray(np.random.default_rng(2).normal(size=(4, WIDTH)), jnp.float32)
    targets = jnp.asarray([[[0], [8], [3]], [[2], [2], [7]]])

    def total(weight, width):
        def head(x):
            return MODEL.logits({}, x @ weight) if width == WIDTH else x @ weight[:, :width]

        log_pi, entropy = token_logprobs(head, hidden, targets, chunk=2)
        return log_pi.sum(), entropy

    (value, entropy), grad = jax.value_and_grad(total, has_aux=True)(weight, WIDTH)
    (expected, entropy_), grad_ = jax.value_and_grad(total, has_aux=True)(weight, USED)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(entropy, entropy_, rtol=1e-5)
    np.testing.assert_allclose(grad, grad_, rtol=1e-5, atol=1e-6)
    assert (grad[:, USED:] == 0).all()


def test_the_bridge_is_that_of_the_narrow_vocabulary():
    p, t, epsilon = masked(3), masked(4), jnp.float32(0.05)
    wide = bridge.solve(p, t, epsilon)
    narrow = bridge.solve(p[:, :USED], t[:, :USED], epsilon)
    for name in ("beta", "kl", "tv"):
        np.testing.assert_allclose(getattr(wide, name), getattr(narrow, name), rtol=1e-4, atol=1e-6)
    assert not wide.nonfinite.any()
    keys = jax.random.split(jax.random.key(0), 50)
    residual, found = coupling.draw_residual(wide, p, t, keys)
    assert found.all()
    assert (residual < USED).all()
    for key in range(20):
        drawn = coupling.draw(p, jax.random.split(jax.random.key(key), 50))
        assert (drawn < USED).all()


def test_forward_kl_and_its_gradient():
    def loss(student, teacher):
        return kl(jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)).sum()

    def wide(student):
        return loss(MODEL.logits({}, student), masked(6))

    student = jnp.asarray(logits(5))
    value, grad = jax.value_and_grad(wide)(student)
    expected, grad_ = jax.value_and_grad(loss)(student[:, :USED], jnp.asarray(logits(6)[:, :USED]))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grad[:, :USED], grad_, rtol=1e-4, atol=1e-6)
    assert (grad[:, USED:] == 0).all()
