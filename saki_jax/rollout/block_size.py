"""How many tokens to draft before the teacher verifies: a matter of cost, never of the tokens."""

from collections.abc import Sequence


def expected_commit(rate: float, block_size: int) -> float:
    """E, the tokens that a row commits of a block of K when a share r of them is corrected:
    (1 - (1 - r)^K) / r, and K where r is 0."""
    if rate == 0:
        return float(block_size)
    return (1 - (1 - rate) ** block_size) / rate


def best_block_size(sizes: Sequence[int], costs: Sequence[float], rate: float) -> int:
    """The block size that commits most for its cost; the smaller of equals.

    Args:
      sizes: to choose from.
      costs: of a wave of each, in any unit.
      rate: share of corrected tokens, r.
    """
    gain = {k: expected_commit(rate, k) / cost for k, cost in zip(sizes, costs, strict=True)}
    return min(sizes, key=lambda k: (-gain[k], k))
