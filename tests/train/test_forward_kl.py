"""The loss of skd against float64, through the whole update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from saki_jax.models.sharding import batch_sharding, make_mesh
from saki_jax.train.baselines import METHODS, Extras
from saki_jax.train.forward_kl import kl
from saki_jax.train.objective import Objective
from saki_jax.train.state import init_state
from saki_jax.train.update import make_update
from train_toys import KEY, bigram, make_rollout

V = 8
PROMPTS = [[1], [2, 3], [4], [1, 1]]
RESPONSES = [[2, 3, 4], [5], [], [6, 0, 7, 2]]


def tables(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(V, V)).astype(np.float32) for _ in range(2)]


def rollout():
    return make_rollout(PROMPTS, RESPONSES, log_p=[[-2.0] * len(r) for r in RESPONSES], junk=np.nan)


def log_softmax(table):
    table = table.astype(np.float64)
    return table - np.log(np.exp(table).sum(-1, keepdims=True))


def previous_tokens():
    """The token before each response token, row by row."""
    return [[p[-1], *r[:-1]][: len(r)] for p, r in zip(PROMPTS, RESPONSES, strict=True)]


def expected(student, teacher, weight_of_row):
    """(loss, gradient of the student's table) in float64; weights sum to 1 over all tokens."""
    log_pi, log_t = log_softmax(student), log_softmax(teacher)
    t = np.exp(log_t)
    divergence = (t * (log_t - log_pi)).sum(-1)
    loss, gradient = 0.0, np.zeros((V, V))
    for row, tokens in enumerate(previous_tokens()):
        for token in tokens:
            loss += weight_of_row(row) * divergence[token]
            gradient[token] += weight_of_row(row) * (np.exp(log_pi[token]) - t[token])
    return loss, gradient


def one_update(student, teacher, batch=None, **objective):
    sgd = optax.sgd(1.0)
    update = make_update(
        bigram(V), METHODS["skd"], Objective(**objective), sgd, teacher=bigram(V), chunk=4
    )
    state = init_state({"table": jnp.asarray(student)}, sgd)
    extras = Extras(teacher_params={"table": jnp.asarray(teacher)})
    return update(state, rollout() if batch is None else batch, KEY, extras)


WEIGHTS = {
    "token_mean": lambda row: 1 / 8,
    "seq_mean": lambda row: 1 / 3 / len(RESPONSES[row]),
    "micro_batch_mean": lambda row: 1 / 2 / 4,  # of two rows each: 4 tokens and 4 tokens
}


@pytest.mark.parametrize("aggregation", sorted(WEIGHTS))
def test_golden_loss_and_gradient(aggregation):
    student, teacher = tables()
    state, stats = one_update(student, teacher, aggregation=aggregation, micro_batch_rows=2)
    loss, gradient = expected(student, teacher, WEIGHTS[aggregation])
    np.testing.assert_allclose(stats["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(student - state.params["table"], gradient, atol=1e-6)
    assert stats["loss"] == stats["loss_forward_kl"]
    assert (stats["num_valid"], stats["teacher_mode_rate"]) == (8, 0.0)


def test_the_gap_is_that_of_the_committed_tokens():
    student, teacher = tables()
    _, stats = one_update(student, teacher)
    log_pi = log_softmax(student)
    pairs = [
        (a, b)
        for before, row in zip(previous_tokens(), RESPONSES, strict=True)
        for a, b in zip(before, row, strict=True)
    ]
    gaps = [abs(log_pi[a, b] + 2.0) for a, b in pairs]
    np.testing.assert_allclose(stats["log_p_gap_mean"], np.mean(gaps), rtol=1e-5)
    np.testing.assert_allclose(stats["log_p_gap_max"], np.max(gaps), rtol=1e-5)


def test_it_is_0_with_gradient_0_where_the_student_is_the_teacher():
    student, _ = tables()
    state, stats = one_update(student, student)
    np.testing.assert_allclose(stats["loss"], 0.0, atol=1e-6)
    np.testing.assert_allclose(state.params["table"], student, atol=1e-6)


def test_devices_change_nothing(eight_devices):
    student, teacher = tables()
    state, stats = one_update(student, teacher)
    mesh = make_mesh(4, 1, 1, devices=eight_devices[:4])
    with jax.set_mesh(mesh):
        spread = jax.tree.map(
            lambda x: jax.device_put(x, batch_sharding(mesh)) if x.ndim else x, rollout()
        )
        other, figures = one_update(student, teacher, spread)
    np.testing.assert_allclose(figures["loss"], stats["loss"], rtol=1e-6)
    np.testing.assert_allclose(other.params["table"], state.params["table"], atol=1e-6)


def test_a_token_that_both_exclude_adds_nothing_to_value_or_gradient():
    log_t = jnp.log(jnp.array([0.25, 0.75, 0.0]))
    logits = jnp.array([0.3, -0.2, -jnp.inf])

    def loss(logits):
        return kl(log_t, jax.nn.log_softmax(logits))

    value, gradient = jax.value_and_grad(loss)(logits)
    pi = np.exp([0.3, -0.2]) / np.exp([0.3, -0.2]).sum()
    np.testing.assert_allclose(
        value, (np.array([0.25, 0.75]) * np.log([0.25, 0.75] / pi)).sum(), rtol=1e-6
    )
    np.testing.assert_allclose(gradient, [pi[0] - 0.25, pi[1] - 0.75, 0.0], atol=1e-6)
    # A token that the teacher wants and the student cannot give is an infinite loss, not a NaN.
    assert kl(jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([1.0, 0.0]))) == jnp.inf
