"""Intervals and paired differences by the bootstrap, clustered by problem or prompt. NumPy only.

The unit that is drawn again is the problem (for the probe: the prompt), with everything measured on
it: its samples are no independent observations. Two runs measured on the same problems are compared
on the same redrawn problems, so what makes a problem hard for both cancels.

Usage::

    mean_interval(shares)                     # one run: right share of each problem -> Estimate
    paired_difference(mine, theirs)           # two runs, {problem id: value} each -> Estimate
    macro_interval({"a": shares, "b": ...})   # unweighted mean over sets
"""

import math
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
_CHUNK = 4_000_000  # redrawn indices alive at a time


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval.

    Attributes:
      value: over the clusters as they are.
      low: lower end of the percentile interval.
      high: upper end.
      clusters: problems or prompts that went in.
    """

    value: float
    low: float
    high: float
    clusters: int

    def to_json(self) -> dict:
        """The fields as a JSON object."""
        return asdict(self)

    def scaled(self, factor: float) -> "Estimate":
        """The same in another unit, such as percentage points."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.clusters)


def cluster_means(
    names: Sequence[Hashable], values: np.ndarray
) -> tuple[list[Hashable], np.ndarray]:
    """Averages within each cluster first, so that clusters then weigh equally.

    Args:
      names: n cluster names, in any order.
      values: [n] or [n, m]. NaN marks a value that is not there.

    Returns:
      The names in order of first occurrence, and means [clusters, ...] (NaN where a cluster has
      no value).

    >>> cluster_means(["a", "b", "a"], np.array([1.0, 5.0, 3.0]))
    (['a', 'b'], array([2., 5.]))
    """
    values = np.asarray(values, np.float64)
    if len(names) != len(values):
        raise ValueError(f"{len(names)} cluster names for {len(values)} values")
    order = {name: i for i, name in enumerate(dict.fromkeys(names))}
    index = np.array([order[name] for name in names], np.int64)
    there = ~np.isnan(values)
    total = np.zeros((len(order), *values.shape[1:]))
    count = np.zeros_like(total)
    np.add.at(total, index, np.where(there, values, 0.0))
    np.add.at(count, index, there)
    return list(order), _divide(total, count)


def resampled_means(
    values: np.ndarray, *, resamples: int = RESAMPLES, seed: int | Sequence[int] = 0
) -> np.ndarray:
    """Means over clusters redrawn with replacement.

    All columns see the same redrawn clusters, so a difference of columns is a paired difference.

    Args:
      values: [n, m], a row a cluster. NaN: the cluster has no value in this column, and the
        column's mean is over the others.
      resamples: R.
      seed: fixes the draws, which depend on n and R besides.

    Returns:
      [R, m]; NaN where a redraw holds no value of a column at all.
    """
    values = np.asarray(values, np.float64)
    clusters = _count(values)
    rng = np.random.default_rng(seed)
    there = ~np.isnan(values)
    filled = np.where(there, values, 0.0)
    chunk = max(_CHUNK // clusters, 1)
    means = []
    for first in range(0, resamples, chunk):
        rows = min(chunk, resamples - first)
        drawn = rng.integers(0, clusters, (rows, clusters))
        flat = drawn + np.arange(rows)[:, None] * clusters
        weight = np.bincount(flat.ravel(), minlength=rows * clusters).reshape(rows, clusters)
        means.append(_divide(weight @ filled, weight @ there.astype(np.float64)))
    return np.concatenate(means)


def percentile_interval(
    value: float, draws: np.ndarray, clusters: int, level: float = LEVEL
) -> Estimate:
    """An `Estimate` from redrawn values [R]; redraws that are NaN say nothing and are left out.

    Raises:
      ValueError: when no redraw has a value.
    """
    draws = draws[~np.isnan(draws)]
    if not len(draws):
        raise ValueError("no resample holds a value of this quantity: too few clusters have one")
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(value), float(low), float(high), clusters)


def mean_interval(
    values: np.ndarray,
    *,
    resamples: int = RESAMPLES,
    seed: int | Sequence[int] = 0,
    level: float = LEVEL,
) -> Estimate:
    """Mean over clusters [n] with its interval.

    Where all clusters have the same value (no problem solved, or all of them) the interval has no
    width. That is what the bootstrap can say, not certainty.
    """
    values = np.asarray(values, np.float64)
    draws = resampled_means(values[:, None], resamples=resamples, seed=seed)[:, 0]
    return percentile_interval(values.mean(), draws, len(values), level)


def paired_difference(
    mine: Mapping[str, float],
    theirs: Mapping[str, float],
    *,
    resamples: int = RESAMPLES,
    seed: int | Sequence[int] = 0,
    level: float = LEVEL,
) -> Estimate:
    """Mean of ``mine - theirs`` over the problems, each problem redrawn for both.

    The order of the mappings does not matter.

    Raises:
      ValueError: when the two were not measured on the same problems.
    """
    return mean_interval(_differences(mine, theirs), resamples=resamples, seed=seed, level=level)


def macro_interval(
    sets: Mapping[str, np.ndarray],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> Estimate:
    """Unweighted mean over sets of their means; problems are redrawn within each set.

    The sets themselves are the ones meant, not a sample of sets, so they are not redrawn.

    Args:
      sets: set name -> values of its problems [n].
      resamples, seed, level: as elsewhere. A set's draws depend on its name, not on its place.
    """
    if not sets:
        raise ValueError("no set to average over")
    values = {name: np.asarray(v, np.float64) for name, v in sets.items()}
    draws = [
        resampled_means(v[:, None], resamples=resamples, seed=set_seed(seed, name))[:, 0]
        for name, v in values.items()
    ]
    value = float(np.mean([v.mean() for v in values.values()]))
    clusters = sum(len(v) for v in values.values())
    return percentile_interval(value, np.mean(draws, axis=0), clusters, level)


def paired_macro_difference(
    mine: Mapping[str, Mapping[str, float]],
    theirs: Mapping[str, Mapping[str, float]],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> Estimate:
    """`macro_interval` of the paired differences; both are ``{set: {problem id: value}}``.

    Raises:
      ValueError: when sets or problems differ.
    """
    if mine.keys() != theirs.keys():
        raise ValueError(
            f"one run has the sets {sorted(mine)}, the other {sorted(theirs)}: compare runs that "
            "were evaluated on the same sets, or name the sets to compare"
        )
    differences = {name: _differences(mine[name], theirs[name]) for name in mine}
    return macro_interval(differences, resamples=resamples, seed=seed, level=level)


def set_seed(seed: int, name: str) -> tuple[int, int]:
    """The seed of one set's draws, the same whatever other sets there are."""
    return (seed, zlib.crc32(name.encode()))


def smallest_detectable(differences: np.ndarray, *, power_quantile: float = 0.842) -> float:
    """Half-width of a 95 % interval plus the 80 % power quantile, times the standard error.

    A true difference of this size between two runs on so many problems comes out significant in
    about 80 % of repetitions. Normal approximation.

    Args:
      differences: paired differences by problem [n], n >= 2.
      power_quantile: standard normal quantile of the power, 0.842 for 80 %.
    """
    if len(differences) < 2:
        raise ValueError(f"a standard error needs two clusters or more, got {len(differences)}")
    error = float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    return (1.959964 + power_quantile) * error


def _differences(mine: Mapping[str, float], theirs: Mapping[str, float]) -> np.ndarray:
    alone = sorted(mine.keys() ^ theirs.keys())
    if alone:
        raise ValueError(
            f"a paired comparison needs the same problems on both sides; {len(alone)} of "
            f"{len(mine)} and {len(theirs)} are on one side only (first: {alone[0]!r})"
        )
    # Sorted, so that the draws do not depend on the order of the files.
    return np.array([mine[name] - theirs[name] for name in sorted(mine)], np.float64)


def _count(values: np.ndarray) -> int:
    if values.ndim != 2 or not len(values):
        raise ValueError(f"expected values [clusters, columns], got shape {values.shape}")
    return len(values)


def _divide(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
