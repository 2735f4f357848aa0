"""What a guided wave holds at its peak, by the compiler's count; nothing is run."""

import functools

import jax
import jax.numpy as jnp
import pytest

from saki_jax.models.config import Qwen3Config
from saki_jax.models.qwen3 import init_params, language_model
from saki_jax.rollout.keys import step_key
from saki_jax.rollout.slots import empty_slots
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.rollout.wave import guided_wave


def compiled_wave(vocab_size: int, rows: int, block_size: int):
    """A wave over models that are all vocabulary: (compiled, shapes of its blocks)."""
    config = Qwen3Config(vocab_size, 16, 32, 1, 2, 1, 8)
    model = language_model(config, jnp.float32)
    spec = RolloutSpec(8, (0,), 0, block_size=block_size)
    params = jax.eval_shape(lambda: (init_params(config, jax.random.key(0)),) * 2)
    caches = jax.eval_shape(
        lambda: tuple(model.init_cache(rows, spec.cache_slots(8)) for _ in range(2))
    )
    slots = jax.eval_shape(lambda: empty_slots(rows, rows))
    epsilon = jax.ShapeDtypeStruct((), jnp.float32)
    wave = jax.jit(functools.partial(guided_wave, model, model, spec), donate_argnums=1)
    lowered = wave.lower(params, caches, slots, step_key(0, 0), epsilon)
    return lowered.compile(), lowered.out_info


@pytest.mark.slow
def test_a_wave_holds_the_two_logit_tensors_and_little_else():
    """[64 rows, K = 8, V = 151,936]. Beside them: both models' logits at one position of each row,
    for the residual draw (1/K of the tensors), and tiles."""
    rows, block_size, vocab_size = 64, 8, 151_936
    compiled, (_, block) = compiled_wave(vocab_size, rows, block_size)
    tensors = 2 * rows * block_size * vocab_size * 4
    assert tensors < compiled.memory_analysis().temp_size_in_bytes
    assert compiled.memory_analysis().temp_size_in_bytes < tensors * (1 + 1 / block_size + 0.02)
    for leaf in jax.tree.leaves(block):
        assert leaf.shape == (rows, block_size) or leaf.shape == (rows,)
