"""What the loop outside the engine runs on the devices."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from saki_jax.models.lm import LanguageModel
from saki_jax.rollout.keys import Purpose, gumbel, position_keys, uniform
from saki_jax.rollout.slots import Slots
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.rollout.wave import draft, verify


class Programs:
    """What runs on the devices, compiled once for each shape."""

    def __init__(self, student: LanguageModel, teacher: LanguageModel, spec: RolloutSpec):
        models = (student, teacher)
        self.vocab_size = student.vocab_size

        def init_caches(rows: int, slots: int) -> tuple[Any, Any]:
            return tuple(model.init_cache(rows, slots) for model in models)

        def prefill(caches: tuple, params: tuple, tokens: Array, target: Array) -> tuple:
            """tokens [R, P - 1] into the cache rows ``target`` [R] (out of range: dropped)."""
            rows, width = tokens.shape
            filled = []
            for model, p, cache in zip(models, params, caches, strict=True):
                fresh = model.init_cache(rows, width)
                _, fresh = model.forward(p, tokens, jnp.zeros(rows, jnp.int32), fresh)
                filled.append(jax.tree.map(lambda old, new: insert(old, new, target), cache, fresh))
            return tuple(filled)

        def insert(old: Array, new: Array, target: Array) -> Array:
            return old.at[target, : new.shape[1]].set(new, mode="drop")

        def propose(caches: tuple, params: tuple, slots: Slots, key: jax.Array) -> tuple:
            """Drafts and verifies a block; the second result is what leaves the devices."""
            cache, proposal, logits_p = draft(
                student, params[0], caches[0], slots, key, spec.block_size
            )
            teacher_cache, logits_t = verify(teacher, params[1], caches[1], slots, proposal)
            position = slots.count[None, :] + jnp.arange(spec.block_size, dtype=jnp.int32)[:, None]
            sequence_id = jnp.broadcast_to(slots.sequence_id[None, :], position.shape)
            v = uniform(position_keys(key, sequence_id, position, Purpose.ACCEPT))
            return (cache, teacher_cache), (proposal, logits_p, logits_t, v)

        def residual_noise(key: jax.Array, sequence_id: Array, position: Array) -> Array:
            keys = position_keys(key, sequence_id, position, Purpose.RESIDUAL)
            return gumbel(keys, student.vocab_size)

        self.init_caches = jax.jit(init_caches, static_argnums=(0, 1))
        self.prefill = jax.jit(prefill, donate_argnums=0)
        self.propose = jax.jit(propose, donate_argnums=0)
        self.residual_noise = jax.jit(residual_noise)
