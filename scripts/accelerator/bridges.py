"""The bridge on the device, judged in float64 on the host (`rollout/reference.py`)."""

from functools import cache, partial

import ml_dtypes
import numpy as np

from accelerator.findings import Check, Finding, Setting
from accelerator.randomness import on
from saki_jax.rollout import bridge, reference

EPSILONS = (1e-4, 0.02, 1.0)
OVER = 1e-5  # KL(q || p) may pass epsilon by this part of it
UNUSED = 0.005  # and leave so much of it unused where it binds
_ROWS = 3  # of a family


def rows(vocab: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Logits of student and teacher [rows, V] on which bridge solvers go wrong."""
    rng = np.random.default_rng(11)
    shape = (_ROWS, vocab)

    def language() -> np.ndarray:
        """Zipf over a random order, with a little noise."""
        order = np.stack([rng.permutation(vocab) + 1 for _ in range(_ROWS)])
        return -rng.uniform(0.8, 2.5, (_ROWS, 1)) * np.log(order) + rng.normal(0, 0.5, shape)

    def but(logits: np.ndarray, share: float, value: float) -> np.ndarray:
        """The same with a share of the entries (never the first) changed to, or by, a value."""
        hit = rng.random(shape) < share
        hit[:, 0] = False
        return np.where(hit, logits + value if np.isfinite(value) else value, logits)

    def peak(at: int) -> np.ndarray:
        logits = 0.5 * rng.normal(size=shape)
        logits[:, at] += 15
        return logits

    a = language()
    near = {size: a + size * rng.normal(size=shape) for size in (1e-4, 1e-2, 0.5)}
    rare_a, rare_b = a.copy(), near[1e-2].copy()
    rare_a[:, 5], rare_b[:, 5] = a.max(axis=1) - 28, near[1e-2].max(axis=1) + 2
    pairs = [
        (a, a + 1.5),  # equal but for a constant
        *((a, b) for b in near.values()),
        (a, language()),  # unrelated
        (a, a + 0.3 * rng.standard_cauchy(shape)),  # heavy tails
        (peak(3), peak(3)),  # certain, and of one mind
        (peak(3), peak(4)),  # certain, and of two minds
        (rare_a, rare_b),  # the teacher's choice has p of about 1e-12
        (a, but(near[0.5], 0.01, -60.0)),
        (but(a, 0.01, -60.0), near[0.5]),
        (a, but(near[0.5], 0.05, -np.inf)),  # the teacher excludes some of p: no beta may fit
        (a, but(near[0.5], 0.33, -np.inf)),
        (but(a, 0.05, -np.inf), near[0.5]),
        (a, np.where(np.arange(vocab) == 2, a, -np.inf)),  # the teacher knows one token
    ]
    return tuple(np.concatenate(side).astype(dtype) for side in zip(*pairs, strict=True))


def checks(setting: Setting) -> dict[str, Check]:
    """By name, for each size and type of logits."""
    small = min(setting.vocab, setting.wide_vocab)
    found: dict[str, Check] = {}
    for vocab, dtype in ((small, np.float32), (setting.wide_vocab, ml_dtypes.bfloat16)):
        judged = cache(partial(_judge, setting, vocab, dtype))
        label = f"bridge, V = {vocab}, {np.dtype(dtype).name}: "
        figures = {
            "KL above epsilon, relative": (0, OVER),
            "epsilon left unused where it binds": (1, UNUSED),
            "bridges at beta 0 although some beta fits": (2, 0),
            "TV(p, q) as reported, relative error": (3, 1e-4),
        }
        for name, (which, bound) in figures.items():
            found[label + name] = partial(_pick, judged, which, bound)
    found["bridge: rows with NaN or +inf that are not flagged"] = partial(_flags, setting)
    return found


def _pick(judged, which: int, bound: float) -> Finding:
    values, note = judged()
    return Finding(values[which], bound, note)


def _solve(logits_p, logits_t, epsilon):
    solved = bridge.solve(logits_p, logits_t, epsilon)
    return solved.beta, solved.tv, solved.nonfinite


def _judge(setting: Setting, vocab: int, dtype: type) -> tuple[tuple[float, ...], str]:
    """Over all rows and budgets: the figures of `checks`, and what was seen."""
    a, b = rows(vocab, dtype)
    figures, binding = [], 0
    for epsilon in np.float32(EPSILONS):
        betas, tvs, _ = on(setting.device, _solve, a, b, epsilon)
        for p, t, beta, tv in zip(a, b, betas, tvs, strict=True):
            found, binds = _judge_row(p, t, float(beta), float(tv), float(epsilon))
            figures.append(found)
            binding += binds
    over, unused, given_up, tv_error = np.array(figures).T
    values = (over.max(), unused.max(), given_up.sum(), tv_error.max())
    return values, f"{len(figures)} bridges, {binding} bind"


def _judge_row(
    p: np.ndarray, t: np.ndarray, beta: float, tv: float, epsilon: float
) -> tuple[tuple[float, float, bool, float], bool]:
    """(KL over epsilon, epsilon unused, given up, error of TV) and whether epsilon binds."""
    log_p, log_t = reference.log_softmax(p), reference.log_softmax(t)

    def kl(at: float) -> float:
        return reference.kl_divergence(reference.interpolate(log_p, log_t, at), log_p)

    used = kl(beta) / epsilon
    binds = 0 < beta < 1 - 2.0**-23
    # As beta falls to 0, KL falls to what the teacher's exclusions cost.
    given_up = beta == 0 and kl(1e-30) < epsilon * (1 - 1e-4)
    true_tv = reference.total_variation(log_p, reference.interpolate(log_p, log_t, beta))
    tv_error = abs(tv - true_tv) / (true_tv + 1e-3)
    return (used - 1, 1 - used if binds else 0.0, given_up, tv_error), binds


def _flags(setting: Setting) -> Finding:
    a, b = rows(min(setting.vocab, setting.wide_vocab), np.float32)
    bad = (a[:4].copy(), b[:4].copy())
    bad[0][0, 7], bad[1][1, 7], bad[0][2, 7] = np.nan, np.nan, np.inf
    bad[1][3] = -np.inf
    a, b = np.concatenate([a, bad[0]]), np.concatenate([b, bad[1]])
    beta, tv, flagged = on(setting.device, _solve, a, b, np.float32(0.02))
    expected = np.arange(len(a)) >= len(a) - 4
    wrong = (flagged != expected) | ~np.isfinite(beta) | ~np.isfinite(tv)
    return Finding(float(wrong.sum()), 0, f"of {len(a)}, 4 of them bad")
