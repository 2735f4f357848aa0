"""Intervals and detectable differences where seeds and problems are both a sample. NumPy, SciPy."""

import math

import numpy as np
from scipy import stats

from saki_jax.evals import bootstrap
from saki_jax.evals.bootstrap import Estimate

LEVEL, POWER = 0.95, 0.80


def crossed_draws(
    values: np.ndarray, *, resamples: int = bootstrap.RESAMPLES, seed: int = 0
) -> np.ndarray:
    """Means over seeds and problems, both redrawn (the pigeonhole bootstrap, Owen 2007).

    Every seed and column sees the same redrawn problems, and every column the same redrawn seeds:
    a difference of columns is paired by both. Of S seeds S - 1 are redrawn, because S would show
    the variance between seeds too small by (S - 1) / S; a single seed stays as it is, and the
    draws then tell of the problems alone. What a seed does to one problem is counted more than
    once, so the spread is rather too large than too small.

    Args:
      values: [S, n, m]: seeds, problems, columns.
      resamples: R.
      seed: of the draws.

    Returns:
      [R, m].
    """
    seeds, problems, columns = values.shape
    flat = np.moveaxis(values, 0, 1).reshape(problems, seeds * columns)
    means = bootstrap.resampled_means(flat, resamples=resamples, seed=seed)
    means = means.reshape(resamples, seeds, columns)
    if seeds == 1:
        return means[:, 0]
    drawn = np.random.default_rng((seed, 1)).integers(0, seeds, (resamples, seeds - 1))
    return np.take_along_axis(means, drawn[:, :, None], axis=1).mean(axis=1)


def estimates(values: np.ndarray) -> list[Estimate]:
    """The mean of each column of `values` [S, n, m] with its interval."""
    draws = crossed_draws(values)
    return [
        bootstrap.percentile_interval(mean, draws[:, i], values.shape[1], LEVEL)
        for i, mean in enumerate(values.mean(axis=(0, 1)))
    ]


def smallest_difference(differences: np.ndarray) -> float:
    """A true difference of this size would be found in about 80 % of such comparisons.

    Args:
      differences: [S, n, m]: methods minus a reference, paired by seed and problem.

    Found means: outside (t(0.975) + t(0.8)) standard errors. The error is the root mean square of
    the columns' `crossed_draws`; the degrees of freedom are (S - 1) m, those of the seeds. With a
    single seed it is the normal law, and seeds are not in it.
    """
    seeds, _, columns = differences.shape
    error = math.sqrt((crossed_draws(differences).std(axis=0) ** 2).mean())
    law = stats.t((seeds - 1) * columns) if seeds > 1 else stats.norm()
    return float(law.ppf((1 + LEVEL) / 2) + law.ppf(POWER)) * error
