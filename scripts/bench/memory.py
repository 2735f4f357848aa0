"""Temporary memory of a wave, as the compiler reports it."""

import jax
import jax.numpy as jnp
import numpy as np

from bench.scenario import Pair
from bench.snapshots import at_work
from saki_jax.rollout.generate import student_wave
from saki_jax.rollout.keys import Purpose, step_key
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.rollout.wave import guided_wave


def wave_memory(pair: Pair, spec: RolloutSpec, slots: int, prompt_length: int) -> dict[str, int]:
    """Temporary bytes of a compiled wave and of a student step; works from shapes alone."""
    state = jax.eval_shape(
        lambda: at_work(np.arange(slots), np.zeros(slots, int), np.full(slots, prompt_length))
    )
    capacity = spec.cache_slots(prompt_length)
    caches = jax.eval_shape(
        lambda: tuple(m.init_cache(slots, capacity) for m in (pair.student, pair.teacher))
    )
    params = (pair.student_params, pair.teacher_params)
    key, epsilon = step_key(0, 0), jax.ShapeDtypeStruct((), jnp.float32)

    def guided(params, caches, state, key, epsilon):
        return guided_wave(pair.student, pair.teacher, spec, params, caches, state, key, epsilon)

    def alone(params, caches, state, key, epsilon):
        return student_wave(
            pair.student, Purpose.DRAFT, params[:1], caches[:1], state, key, epsilon
        )

    result = {}
    for name, function in {"wave": guided, "student_step": alone}.items():
        lowered = jax.jit(function, donate_argnums=1).lower(params, caches, state, key, epsilon)
        result[name] = lowered.compile().memory_analysis().temp_size_in_bytes
    return result
