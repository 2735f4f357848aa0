"""Section 3 of the paper, read aloud: sequential, float64, NumPy, one row at a time.

Nothing here is fast. It is what the accelerated path is tested against, and the place to look up
what a quantity means. A language model is a function from a history (a tuple of token ids) to
logits [V].
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

Model = Callable[[tuple[int, ...]], np.ndarray]


# 3.2 The bridge


class Bridge(NamedTuple):
    """q_beta between student and teacher at one prefix."""

    beta: float
    log_p: np.ndarray
    log_t: np.ndarray
    log_q: np.ndarray


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Normalised log-probabilities; entries of -inf stay."""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def kl_divergence(log_q: np.ndarray, log_p: np.ndarray) -> float:
    """KL(q || p) in nats; inf where q has mass that p has not."""
    present = log_q > -np.inf
    return float((np.exp(log_q[present]) * (log_q[present] - log_p[present])).sum())


def total_variation(log_p: np.ndarray, log_q: np.ndarray) -> float:
    """TV(p, q) = Σ [q - p]+."""
    return float(np.maximum(np.exp(log_q) - np.exp(log_p), 0.0).sum())


def interpolate(log_p: np.ndarray, log_t: np.ndarray, beta: float) -> np.ndarray:
    """log of q_beta(v) ∝ p(v)^(1-beta) T(v)^beta.

    The ends are p and T themselves, so 0 · (-inf) never appears: for beta > 0 a token that the
    teacher excludes is excluded, for beta < 1 one that the student excludes.
    """
    if beta == 0:
        return log_p
    if beta == 1:
        return log_t
    both = (log_p > -np.inf) & (log_t > -np.inf)
    mixed = np.full_like(log_p, -np.inf)
    mixed[both] = (1 - beta) * log_p[both] + beta * log_t[both]
    return log_softmax(mixed) if both.any() else mixed


def solve_bridge(logits_p: np.ndarray, logits_t: np.ndarray, epsilon: float) -> Bridge:
    """The largest beta in [0, 1] with KL(q_beta || p) <= epsilon, by bisection to the last bit.

    KL grows with beta, so the feasible betas are an interval. epsilon = 0 gives beta = 0.
    """
    log_p, log_t = log_softmax(logits_p), log_softmax(logits_t)

    def feasible(beta: float) -> bool:
        log_q = interpolate(log_p, log_t, beta)
        return bool((log_q > -np.inf).any()) and kl_divergence(log_q, log_p) <= epsilon

    if epsilon == 0:
        beta = 0.0
    elif feasible(1.0):
        beta = 1.0
    else:
        beta, too_large = 0.0, 1.0
        while beta < (middle := (beta + too_large) / 2) < too_large:
            beta, too_large = (middle, too_large) if feasible(middle) else (beta, middle)
    return Bridge(beta, log_p, log_t, interpolate(log_p, log_t, beta))


# 3.3 Maximal coupling


def acceptance(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """min(1, q(z) / p(z)) for each proposal z; 1 where p(z) = 0, which is never proposed."""
    with np.errstate(invalid="ignore"):
        ratio = np.where(log_p > -np.inf, log_q - log_p, 0.0)
    return np.exp(np.minimum(ratio, 0.0))


def residual(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """[q - p]+ / TV(p, q), the law of a correction; zeros where p = q."""
    excess = np.maximum(np.exp(log_q) - np.exp(log_p), 0.0)
    mass = excess.sum()
    return excess / mass if mass > 0 else excess


def one_step_law(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """The law of the committed token, summed over all proposals; the paper proves that it is q."""
    p, accept, correction = np.exp(log_p), acceptance(log_p, log_q), residual(log_p, log_q)
    law = p * accept  # y = z
    for z in range(len(p)):
        law = law + p[z] * (1 - accept[z]) * correction
    return law


class Token(NamedTuple):
    """One coupling event."""

    token: int
    proposal: int
    corrected: bool


def couple(bridge: Bridge, rng: np.random.Generator) -> Token:
    """Draws y ~ q from a proposal z ~ p, changing z as rarely as possible."""
    p = np.exp(bridge.log_p)
    z = int(rng.choice(len(p), p=p / p.sum()))
    if rng.random() < acceptance(bridge.log_p, bridge.log_q)[z]:
        return Token(z, z, corrected=False)
    law = residual(bridge.log_p, bridge.log_q)
    if law.sum() == 0:  # p = q up to rounding: the proposal stands
        return Token(z, z, corrected=False)
    return Token(int(rng.choice(len(law), p=law / law.sum())), z, corrected=True)


def generate(
    student: Model,
    teacher: Model,
    prompt: Sequence[int],
    epsilon: float,
    response_length: int,
    rng: np.random.Generator,
    end_ids: Collection[int] = (),
) -> list[Token]:
    """A guided response, token by token, up to its first end token or the length cap."""
    response: list[Token] = []
    while len(response) < response_length:
        history = (*prompt, *(event.token for event in response))
        bridge = solve_bridge(student(history), teacher(history), epsilon)
        response.append(couple(bridge, rng))
        if response[-1].token in end_ids:
            break
    return response


# What a response's law must be, however it is produced


def sequence_law(
    student: Model,
    teacher: Model,
    prompt: Sequence[int],
    epsilon: float,
    response_length: int,
    end_ids: Collection[int] = (),
) -> dict[tuple[int, ...], float]:
    """The probability of every response: the product of q along it, by full enumeration."""
    law: dict[tuple[int, ...], float] = {}
    growing: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(1, response_length + 1):
        longer: dict[tuple[int, ...], float] = {}
        for response, mass in growing.items():
            history = (*prompt, *response)
            log_q = solve_bridge(student(history), teacher(history), epsilon).log_q
            for token, q in enumerate(np.exp(log_q)):
                ends = token in end_ids or length == response_length
                (law if ends else longer)[(*response, token)] = mass * float(q)
        growing = longer
    return law
