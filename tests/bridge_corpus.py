"""Pairs of student and teacher logits on which bridge solvers have failed, and their judge.

Each family is a function (rng, rows, V) -> (logits_p, logits_t) in float64; `pair` rounds them to
the dtype under test, and the judge works on the rounded values in extended precision.
"""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from saki_jax.rollout import bridge

EPSILONS = (0.0, 1e-8, 1e-6, 1e-4, 4e-4, 1e-3, 0.02, 0.1, 1.0, 1e4)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def _base(rng, rows, vocab):
    """A language-model-like student: Zipf over a random order with a little noise."""
    order = rng.permuted(np.tile(np.arange(1, vocab + 1), (rows, 1)), axis=1)
    return -rng.uniform(0.8, 2.5, (rows, 1)) * np.log(order) + rng.normal(0, 0.5, (rows, vocab))


def _near(size):
    def family(rng, rows, vocab):
        a = _base(rng, rows, vocab)
        return a, a + size * rng.normal(size=a.shape)

    return family


def _heavy(draw):
    def family(rng, rows, vocab):
        a = _base(rng, rows, vocab)
        return a, a + 0.3 * draw(rng, a.shape)

    return family


def _spikes(height, both=False):
    """A few entries of the teacher (of the student, every second row) lie ``height`` away."""

    def family(rng, rows, vocab):
        a = _base(rng, rows, vocab)
        b = a + 0.5 * rng.normal(size=a.shape)
        for row in range(rows):
            hit = rng.choice(vocab, size=max(1, vocab // 100), replace=False)
            (a if row % 2 else b)[row, hit] += height
        return a, b

    return family


def _excluded(share, of_teacher=True):
    def family(rng, rows, vocab):
        a = _base(rng, rows, vocab)
        b = a + 0.5 * rng.normal(size=a.shape)
        hit = rng.random(a.shape) < share
        hit[:, 0] = False
        (b if of_teacher else a)[hit] = -np.inf
        return a, b

    return family


def _dirichlet(rng, rows, vocab):
    draws = rng.standard_gamma(rng.choice([0.05, 0.3, 1.0], (2, rows, 1)), (2, rows, vocab))
    return tuple(np.log(np.maximum(draws, 1e-300)))


def _zipf(rng, rows, vocab):
    return _base(rng, rows, vocab), _base(rng, rows, vocab)


def _peaked(agree):
    def family(rng, rows, vocab):
        a, b = 0.5 * rng.normal(size=(2, rows, vocab))
        top = rng.integers(vocab, size=rows)
        other = top if agree else (top + 1 + rng.integers(vocab - 1, size=rows)) % vocab
        a[np.arange(rows), top] += rng.uniform(8, 20, rows)
        b[np.arange(rows), other] += rng.uniform(8, 20, rows)
        return a, b

    return family


def _one_hot(student):
    def family(rng, rows, vocab):
        a, b = rng.normal(size=(2, rows, vocab))
        hot = a if student else b
        keep = rng.integers(vocab, size=rows)
        values = hot[np.arange(rows), keep]
        hot[:] = -np.inf
        hot[np.arange(rows), keep] = values
        return a, b

    return family


def _equal(rng, rows, vocab):
    a = _base(rng, rows, vocab)
    return a, a + rng.integers(-8, 9, (rows, 1)) * np.float64(0.5)


def _loved_rarity(rng, rows, vocab):
    """A token of p = 1e-12 that carries most of T."""
    a = _base(rng, rows, vocab)
    a -= np.log(np.exp(a).sum(1, keepdims=True))
    b = a + 0.1 * rng.normal(size=a.shape)
    rare = rng.integers(vocab, size=rows)
    a[np.arange(rows), rare] = np.log(1e-12)
    b[np.arange(rows), rare] = rng.uniform(-1, 3, rows)
    return a, b


FAMILIES = {
    "dirichlet": _dirichlet,
    "zipf": _zipf,
    "peaked_agreeing": _peaked(True),
    "peaked_disagreeing": _peaked(False),
    "one_hot_p": _one_hot(True),
    "one_hot_t": _one_hot(False),
    "equal": _equal,
    "near_1e-5": _near(1e-5),
    "near_1e-4": _near(1e-4),
    "near_1e-3": _near(1e-3),
    "near_1e-2": _near(1e-2),
    "near_1e-1": _near(1e-1),
    "student_t2": _heavy(lambda rng, shape: rng.standard_t(2, shape)),
    "cauchy": _heavy(lambda rng, shape: rng.standard_cauchy(shape)),
    "spikes_-60": _spikes(-60),
    "spikes_-1e4": _spikes(-1e4),
    "spikes_+33": _spikes(33),
    "loved_rarity": _loved_rarity,
    "t_excludes_third": _excluded(1 / 3),
    "t_excludes_5_percent": _excluded(0.05),
    "p_excludes_5_percent": _excluded(0.05, of_teacher=False),
}


def pair(family: str, rows: int, vocab: int, dtype: str, seed: int = 0):
    """(logits_p, logits_t) of a family, rounded to ``dtype``."""
    rng = np.random.default_rng([seed, vocab, *family.encode()])
    return tuple(x.astype(DTYPES[dtype]) for x in FAMILIES[family](rng, rows, vocab))


@partial(jax.jit, static_argnames=("solver", "tile"))
def _solve(logits_p, logits_t, epsilon, solver, tile):
    return bridge.solve(logits_p, logits_t, epsilon, solver=solver, tile=tile)


def solve(logits_p, logits_t, epsilon=0.02, solver="newton", tile=0) -> bridge.Bridge:
    """The bridge under jit, from NumPy logits."""
    a, b = jnp.asarray(logits_p), jnp.asarray(logits_t)
    return _solve(a, b, jnp.float32(epsilon), solver, tile)


@jax.jit
def _entries(solved, a, b):
    return bridge.log_ratios(solved, a.astype(jnp.float32), b.astype(jnp.float32))


def every_entry(solved, logits_p, logits_t) -> list[np.ndarray]:
    """(log_p, log_t, log_q, x) of the whole vocabulary."""
    terms = _entries(solved, jnp.asarray(logits_p), jnp.asarray(logits_t))
    return [np.asarray(term) for term in terms]


token_terms = jax.jit(bridge.token_terms)


def log_softmax(logits) -> np.ndarray:
    x = np.asarray(logits).astype(np.longdouble)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def true_log_q(log_p, log_t, beta) -> np.ndarray:
    """log q_beta in extended precision; the limit beta -> 0 is not taken: beta = 0 gives p."""
    beta = np.asarray(beta, np.longdouble)[..., None]
    with np.errstate(invalid="ignore"):
        mixed = np.where(beta == 0, log_p, (1 - beta) * log_p + beta * log_t)
        mixed = np.where(beta == 1, log_t, mixed)
        mixed = np.where((log_p == -np.inf) & (beta < 1), -np.inf, mixed)
    mixed = mixed - mixed.max(-1, keepdims=True)
    return mixed - np.log(np.exp(mixed).sum(-1, keepdims=True))


def true_kl(log_p, log_t, beta) -> np.ndarray:
    """KL(q_beta || p) in extended precision, [*B]."""
    log_q = true_log_q(log_p, log_t, beta)
    with np.errstate(invalid="ignore"):
        return np.where(log_q == -np.inf, 0, np.exp(log_q) * (log_q - log_p)).sum(-1)


def largest_beta(log_p, log_t, epsilon: float, steps: int = 90) -> np.ndarray:
    """The largest feasible beta by bisection, first over log beta, so tiny ones are resolved."""
    one = np.ones(log_p.shape[:-1], np.longdouble)
    fits = true_kl(log_p, log_t, one) <= epsilon
    low, high = 0 * one, one
    for step in range(steps):
        middle = np.where(low == 0, high * 2.0 ** -(2**step), np.sqrt(low * high))
        if step > 40:
            middle = (low + high) / 2
        feasible = true_kl(log_p, log_t, middle) <= epsilon
        low, high = np.where(feasible, middle, low), np.where(feasible, high, middle)
    return np.where(fits, 1, low)
