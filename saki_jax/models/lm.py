"""The face of a language model that generation and scoring see."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Params = Any  # a pytree of arrays
Cache = Any  # a pytree of arrays [B, S, ...]: rows, then slots


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model as pure functions over plain pytrees.

    Token ``j`` of row ``b`` sits at position ``start[b] + j``, which is also its cache slot, and
    attends to the slots ``<= start[b] + j`` of its own row. What lies in later slots is never
    seen: rolling a cache back is only not advancing ``start``. Writes past the last slot are
    dropped.

    Attributes:
      vocab_size: V, the number of rows of the head.
      init_cache: ``(B, S) -> cache`` with S slots a row.
      forward: ``(params, tokens [B, J], start [B], cache, segment_ids=None) -> (hidden [B, J, D],
        cache)``. With ``cache=None`` (then ``start`` is ignored and may be None) the whole
        sequences are given and the second result is None. Then ``segment_ids`` int [B, J] may say
        that several sequences lie one behind the other in a row, each a run of one id: a token
        sees its own sequence alone, and positions count from 0 in each. The id 0 is padding,
        whose result means nothing.
      logits: ``(params, hidden [*B, D]) -> [*B, V]`` in float32, whatever the compute dtype.
    """

    vocab_size: int
    init_cache: Callable[[int, int], Cache]
    forward: Callable[..., tuple[Any, Cache]]
    logits: Callable[[Params, Any], Any]
