import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.train.objective import (
    Clips,
    extrapolated_advantage,
    k1_advantage,
    masked_mean,
    masked_nll,
    surrogate,
    token_weights,
)

CLIPS = Clips()
# One position: student logits and teacher of R05.
Z = jnp.array([0.2, -0.3, 0.5])
LOG_T = jnp.log(jnp.array([0.2, 0.3, 0.5]))


def everywhere(x):
    return jnp.ones(x.shape, bool)


def token_loss(log_pi, log_p_old, advantage):
    return surrogate(log_pi, log_p_old, advantage, everywhere(log_pi), CLIPS).loss


R04 = [  # A, r, loss, d loss / d log pi
    (-2, 5, 6.0, 0.0),
    (-2, 2.9, 5.8, 5.8),
    (-2, 1.1, 2.2, 2.2),
    (-2, 0.5, 1.6, 0.0),
    (2, 5, -2.4, 0.0),
    (2, 1.1, -2.2, -2.2),
    (2, 0.5, -1.0, -1.0),
]


@pytest.mark.parametrize(("advantage", "ratio", "loss", "slope"), R04)
def test_r04_dual_clip_table(advantage, ratio, loss, slope):
    log_pi = jnp.array([jnp.log(ratio) - 1.5])
    old, a = jnp.array([-1.5]), jnp.array([float(advantage)])
    value, grad = jax.value_and_grad(lambda x: token_loss(x, old, a).sum())(log_pi)
    np.testing.assert_allclose(value, loss, rtol=1e-6)
    np.testing.assert_allclose(grad, [slope], rtol=1e-6, atol=1e-7)


def test_r04_what_each_clip_did_is_reported():
    log_pi = jnp.log(jnp.array([r for _, r, _, _ in R04]))
    advantage = jnp.array([float(a) for a, _, _, _ in R04])
    terms = surrogate(log_pi, jnp.zeros(7), advantage, everywhere(log_pi), CLIPS)
    assert terms.dual_clipped.tolist() == [True] + [False] * 6
    assert terms.ratio_clipped.tolist() == [False, False, False, True, True, False, False]


def expected_gradient(per_token):
    """Gradient in z of Σ_v p(v) [loss of sampling v], with p held fixed as the sampler."""
    p = jax.nn.softmax(Z)
    return jax.grad(lambda z: (p * per_token(jax.nn.log_softmax(z))).sum())(Z)


def test_r05_expected_gradient_is_that_of_the_reverse_kl():
    old = jax.nn.log_softmax(Z)

    def ours(log_pi):
        advantage, _ = k1_advantage(log_pi, LOG_T, clamp=10.0)
        return token_loss(log_pi, old, advantage)

    def reverse_kl(z):
        log_pi = jax.nn.log_softmax(z)
        return (jnp.exp(log_pi) * (log_pi - LOG_T)).sum()

    np.testing.assert_allclose(reverse_kl(Z), 0.0583122, atol=1e-6)
    analytic = jax.grad(reverse_kl)(Z)
    np.testing.assert_allclose(expected_gradient(ours), analytic, atol=1e-6)
    np.testing.assert_allclose(analytic, [0.158016, -0.089923, -0.068093], atol=1e-6)


def test_r05_the_wrong_estimators_would_be_seen():
    k1 = expected_gradient(lambda log_pi: log_pi - LOG_T)
    np.testing.assert_allclose(k1, 0.0, atol=1e-6)
    k3 = expected_gradient(lambda log_pi: jnp.exp(LOG_T - log_pi) - 1 - (LOG_T - log_pi))
    np.testing.assert_allclose(k3, [0.138250, -0.094841, -0.043410], atol=1e-6)


def test_r06_nothing_flows_through_advantage_old_or_teacher():
    def loss(z, log_p_old, log_t):
        log_pi = jax.nn.log_softmax(z)[:1]
        advantage, _ = k1_advantage(log_pi, log_t, clamp=10.0)
        return token_loss(log_pi, log_p_old, advantage).sum()

    grads = jax.grad(loss, argnums=(0, 1, 2))(Z, jax.nn.log_softmax(Z)[:1], LOG_T[:1])
    np.testing.assert_allclose(grads[0], [0.347729, -0.107805, -0.239924], atol=1e-6)
    assert grads[1].tolist() == [0.0]
    assert grads[2].tolist() == [0.0]


@pytest.mark.parametrize("old", [-201.0, -jnp.inf, jnp.inf, jnp.nan, 1e30])
def test_r12_masked_slots_touch_neither_value_nor_gradient(old):
    mask = jnp.array([True, False])
    log_p_old = jnp.array([-1.0, old])

    def loss(log_pi, advantage):
        return surrogate(log_pi, log_p_old, advantage, mask, CLIPS).loss.sum()

    log_pi = jnp.array([-1.0, -1.0])
    for junk in (3.0, jnp.nan, jnp.inf):
        value, grad = jax.value_and_grad(loss)(log_pi, jnp.array([0.7, junk]))
        assert value == pytest.approx(-0.7)
        np.testing.assert_allclose(grad, [-0.7, 0.0], rtol=1e-6)


@pytest.mark.parametrize("junk", [jnp.nan, -jnp.inf])
def test_r12_masked_log_pi_may_be_anything(junk):
    mask = jnp.array([True, False])

    def loss(log_pi):
        terms = surrogate(log_pi, jnp.array([-1.0, -1.0]), jnp.ones(2), mask, CLIPS)
        return terms.loss.sum() + masked_nll(log_pi, mask).sum()

    value, grad = jax.value_and_grad(loss)(jnp.array([-1.0, junk]))
    assert value == pytest.approx(0.0)
    np.testing.assert_allclose(grad, [-2.0, 0.0])


def test_r20_k1_is_clipped_before_the_sign_changes():
    log_pi = jnp.array([-0.1, -12.5, -3.0, -1.0])
    log_t = jnp.array([-15.0, -0.5, -0.2, -1.0])
    advantage, clamped = k1_advantage(log_pi, log_t, clamp=10.0)
    np.testing.assert_allclose(advantage, [-10.0, 10.0, 2.8, 0.0], rtol=1e-6)
    assert clamped.tolist() == [True, True, False, False]


def test_r25_the_advantage_depends_on_the_sampled_token():
    log_p = jax.nn.log_softmax(Z)
    advantage, _ = k1_advantage(log_p, LOG_T, clamp=10.0)
    assert len(set(np.round(advantage, 6).tolist())) == 3
    np.testing.assert_allclose((jnp.exp(log_p) * advantage).sum(), -0.0583122, atol=1e-6)


def test_exopd_by_hand_and_its_limit():
    log_pi, log_t, log_ref = jnp.array([-1.0]), jnp.array([-0.4]), jnp.array([-2.0])
    advantage, _ = extrapolated_advantage(log_pi, log_t, log_ref, strength=1.25, clamp=10.0)
    np.testing.assert_allclose(advantage, [0.6 + 0.25 * 1.6], rtol=1e-6)
    same, _ = extrapolated_advantage(log_pi, log_t, log_ref, strength=1.0, clamp=10.0)
    assert same.tolist() == k1_advantage(log_pi, log_t, clamp=10.0)[0].tolist()


def test_ratio_is_clamped_before_exp():
    log_pi = jnp.array([0.0])
    old = jnp.array([-200.0])
    terms = surrogate(log_pi, old, jnp.array([-1.0]), everywhere(log_pi), CLIPS)
    assert terms.loss.tolist() == [3.0]
    assert terms.log_ratio_clamped.tolist() == [True]


# Four rows of 2, 1, 3 and 0 valid tokens.
RAGGED = jnp.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], bool)


@pytest.mark.parametrize(
    ("aggregation", "rows", "by_row", "denominator"),
    [
        ("token_mean", 2, [1, 1, 1, 0], 6),
        ("seq_mean", 2, [1 / 2, 1, 1 / 3, 0], 3),
        ("micro_batch_mean", 2, [1 / 3, 1 / 3, 1 / 3, 0], 2),
        ("micro_batch_mean", 3, [1 / 6, 1 / 6, 1 / 6, 0], 1),  # the second holds no token
        ("micro_batch_mean", 1, [1 / 2, 1, 1 / 3, 0], 3),  # then it is seq_mean
        ("micro_batch_mean", 8, [1 / 6, 1 / 6, 1 / 6, 0], 1),  # then it is token_mean
    ],
)
def test_token_weights_by_hand(aggregation, rows, by_row, denominator):
    weights, total = token_weights(aggregation, RAGGED, rows)
    np.testing.assert_allclose(weights, RAGGED * np.array(by_row)[:, None], rtol=1e-6)
    assert total == denominator


def test_masked_mean_against_numpy_ma():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(4, 5)).astype(np.float32)
    mask = rng.random((4, 5)) < 0.5
    values[~mask] = np.nan
    expected = np.ma.masked_array(values, ~mask).mean()
    np.testing.assert_allclose(
        masked_mean(jnp.asarray(values), jnp.asarray(mask)), expected, rtol=1e-6
    )
    assert masked_mean(jnp.asarray(values), jnp.zeros(mask.shape, bool)) == 0.0
