"""The bridge between student and teacher (paper 3.2, appendix B).

q_beta(v) ∝ p(v)^(1-beta) T(v)^beta with the largest beta in [0, 1] such that
KL(q_beta || p) <= epsilon, for every row of [*B, V] logits.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from saki_jax.rollout.bridge_measure import tilt
from saki_jax.rollout.bridge_solvers import SOLVERS
from saki_jax.rollout.bridge_survey import Survey, survey
from saki_jax.rollout.tiles import default_tile


class Bridge(NamedTuple):
    """A solved bridge: scalars of each row, from which any entry of p, T and q follows.

    A row with ``nonfinite`` set reports zeros and q = p; nothing may be learnt from it.
    """

    beta: Float[Array, "*B"]
    kl: Float[Array, "*B"]  # KL(q || p) as measured at beta, nats
    tv: Float[Array, "*B"]  # TV(p, q), the mass of [q - p]+
    log_norm: Float[Array, "*B"]  # L(beta) of the shifted log-ratios (bridge_measure.py)
    survey: Survey  # normalisers of p and T
    passes: Int[Array, "*B"]  # measurements that the row took part in

    @property
    def entropy(self) -> Float[Array, "*B"]:
        """H(p), nats."""
        return self.survey.entropy

    @property
    def teacher_mode(self) -> Int[Array, "*B"]:
        """argmax T, the lowest id among equals."""
        return self.survey.teacher_mode

    @property
    def nonfinite(self) -> Bool[Array, "*B"]:
        """Rows in which a model gave NaN, +inf or nothing but -inf."""
        return self.survey.nonfinite


def solve(
    logits_p: Float[Array, "*B V"],
    logits_t: Float[Array, "*B U"],
    epsilon: Float[Array, ""],
    *,
    solver: str = "newton",
    tile: int = 0,
) -> Bridge:
    """Solves the bridge row by row.

    beta = 0 and q = p bit for bit where epsilon is 0 or the teacher excludes more of p than
    epsilon allows; beta = 1 and q = T bit for bit where KL(T || p) <= epsilon. A token with
    p = 0 keeps q = 0, one with T = 0 has q = 0 for every beta > 0.

    Args:
      logits_p: the student's logits, any float type; computed in float32.
      logits_t: the teacher's, over the same vocabulary (U = V).
      epsilon: the KL budget, a float32 array.
      solver: "newton" reaches epsilon from below within 4e-5 wherever it binds; "bisect" is the
        paper's 16 waves.
      tile: vocabulary entries read at a time, so that temporaries are a few [*B, tile]; 0 chooses.

    Raises:
      ValueError: the two vocabularies differ, or there is no such solver.
    """
    if logits_p.shape != logits_t.shape:
        raise ValueError(
            f"student logits {logits_p.shape} and teacher logits {logits_t.shape} differ in shape; "
            "the bridge needs one vocabulary for both"
        )
    if solver not in SOLVERS:
        raise ValueError(f"unknown solver {solver!r}; choose one of {', '.join(SOLVERS)}")
    tile = tile or default_tile()
    s = survey(logits_p, logits_t, tile=tile)
    search = SOLVERS[solver](logits_p, logits_t, s, epsilon, tile=tile)
    best = search.lower
    return Bridge(best.beta, best.kl, best.tv, best.log_norm, s, search.used)


def log_ratios(
    bridge: Bridge, a: Float[Array, "*B W"], b: Float[Array, "*B W"]
) -> tuple[Float[Array, "*B W"], Float[Array, "*B W"], Float[Array, "*B W"], Float[Array, "*B W"]]:
    """(log_p, log_t, log_q, x = log q - log p) of the entries with logits ``a`` and ``b``.

    q = p exactly (x = 0) where beta = 0, log_q = log_t bit for bit where beta = 1.
    """
    s = bridge.survey
    beta = bridge.beta[..., None]
    log_p, log_q, x = tilt(s, bridge.beta, bridge.log_norm, a, b)
    log_t = (b - s.max_t[..., None]) - s.log_sum_t[..., None]
    log_q = jnp.where(beta == 0, log_p, jnp.where(beta == 1, log_t, log_q))
    x = jnp.where(beta == 0, 0.0, x)
    bad = s.nonfinite[..., None]
    return tuple(jnp.where(bad, 0.0, term) for term in (log_p, log_t, log_q, x))


def token_terms(
    bridge: Bridge,
    logits_p: Float[Array, "*B V"],
    logits_t: Float[Array, "*B V"],
    ids: Int[Array, "*B"],
) -> tuple[Float[Array, "*B"], Float[Array, "*B"], Float[Array, "*B"], Float[Array, "*B"]]:
    """(log_p, log_t, log_q, x = log q - log p) of one token a row, by gathers only.

    Ids outside the vocabulary (placeholders) read the nearest entry: harmless, to be masked.
    """
    ids = jnp.clip(ids, 0, logits_p.shape[-1] - 1)[..., None]
    a, b = (
        jnp.take_along_axis(logits, ids, axis=-1).astype(jnp.float32)
        for logits in (logits_p, logits_t)
    )
    log_p, log_t, log_q, x = (term[..., 0] for term in log_ratios(bridge, a, b))
    return log_p, log_t, log_q, x
