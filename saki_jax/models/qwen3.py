"""Qwen3 (and, without q/k norm, Llama) as a flax.nnx module, and as a `LanguageModel`."""

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from saki_jax.models import cache as caches
from saki_jax.models.attention import Span
from saki_jax.models.config import Qwen3Config
from saki_jax.models.layers import Block, Embedding, Linear, RMSNorm
from saki_jax.models.lm import LanguageModel, Params
from saki_jax.models.parameters import flat_variables, lookup, nest
from saki_jax.models.rotary import rotary_tables
from saki_jax.models.segments import PADDING, segment_starts
from saki_jax.models.sharding import param_shardings


def default_compute_dtype() -> jnp.dtype:
    """bfloat16 on accelerators; float32 on CPU, which is slower in bfloat16."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


class Qwen3(nnx.Module):
    """The whole model. Attribute names are those of the Hugging Face checkpoints.

    Args:
      config: shapes and constants.
      rngs: where the initial weights come from (stream ``params``).
      compute_dtype: of the activations; weights are float32 and cast where they are used.
      remat: recompute each layer in the backward pass of a forward without a cache.
    """

    def __init__(
        self,
        config: Qwen3Config,
        rngs: nnx.Rngs,
        compute_dtype: jnp.dtype | None = None,
        remat: bool = False,
    ):
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype or default_compute_dtype())
        self.remat = remat
        self.embed_tokens = Embedding(config, rngs)
        self.layers = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        shape = (config.hidden_size, config.vocab_size)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(shape, ("embed", "vocab"), config.initializer_range, rngs)
        )

    def __call__(self, tokens, start=None, cache=None, segment_ids=None):
        """Hidden states after the last norm, [B, J, D]; see `LanguageModel.forward`."""
        if cache is not None and segment_ids is not None:
            raise ValueError("segment_ids go with whole sequences; given was a cache as well")
        offsets = jnp.arange(tokens.shape[1])[None, :]
        own = offsets if cache is None else start[:, None] + offsets
        first = jnp.zeros_like(own) if segment_ids is None else segment_starts(segment_ids)
        rotation = rotary_tables(own - first, self.config.head_dim, self.config.rope_theta)
        # Later slots than its own are not seen: they hold what was rolled back.
        span = Span(first, own)
        if segment_ids is not None:  # padding sees nothing, so that it costs nothing
            span = Span(first, jnp.where(segment_ids == PADDING, -1, own))
        x = self.embed_tokens(tokens, self.compute_dtype)
        if cache is None:
            for block in self.layers:
                run = lambda x, block=block: block(x, rotation, span, None, None)[0]  # noqa: E731
                x = jax.checkpoint(run)(x) if self.remat else run(x)
            return self.norm(x), None
        new_cache = []
        for block, layer in zip(self.layers, cache, strict=True):
            x, layer = block(x, rotation, span, start, layer)
            new_cache.append(layer)
        return self.norm(x), tuple(new_cache)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[*B, D] -> [*B, V] float32. Logits rounded to bfloat16 alone cost a TV of 0.0065."""
        if self.lm_head is None:
            matrix, equation = self.embed_tokens.matrix(hidden.dtype), "...d,vd->...v"
        else:
            matrix, equation = self.lm_head.matrix(hidden.dtype), "...d,dv->...v"
        return jnp.einsum(equation, hidden, matrix, preferred_element_type=jnp.float32)


def abstract_module(
    config: Qwen3Config, compute_dtype: jnp.dtype | None = None, remat: bool = False
) -> Qwen3:
    """The module with shapes in place of arrays."""
    return nnx.eval_shape(
        lambda: Qwen3(config, nnx.Rngs(params=0), compute_dtype=compute_dtype, remat=remat)
    )


def init_params(config: Qwen3Config, key: jax.Array, mesh: jax.sharding.Mesh | None = None) -> Any:
    """Fresh float32 parameters as a plain nested dict; on a mesh, each made where it will lie."""
    return _draw(config, mesh)(key)


@lru_cache(maxsize=8)
def _draw(config: Qwen3Config, mesh: jax.sharding.Mesh | None):
    """The compiled drawing of parameters, kept so that a second call compiles nothing."""

    def draw(key: jax.Array) -> dict:
        _, state = nnx.split(Qwen3(config, nnx.Rngs(params=key)))
        return nest({path: variable[...] for path, variable in flat_variables(state).items()})

    return jax.jit(draw, out_shardings=None if mesh is None else param_shardings(mesh, config))


def language_model(
    config: Qwen3Config, compute_dtype: jnp.dtype | None = None, *, remat: bool = False
) -> LanguageModel:
    """The model as pure functions over the nested dict of `init_params`.

    Args:
      config: shapes and constants.
      compute_dtype: of the activations; default bfloat16 on accelerators, float32 on CPU. The
        parameters may be float32 masters or a copy already cast to it.
      remat: recompute each layer in the backward pass.
    """
    return _language_model(config, jnp.dtype(compute_dtype or default_compute_dtype()), remat)


@lru_cache(maxsize=8)
def _language_model(config: Qwen3Config, compute_dtype: jnp.dtype, remat: bool) -> LanguageModel:
    """Kept, so that equal calls give the same functions and share what was compiled of them."""
    graph, abstract = nnx.split(abstract_module(config, compute_dtype, remat))
    variables = flat_variables(abstract)

    def bind(params: Params) -> Qwen3:
        leaves = [variable.replace(lookup(params, path)) for path, variable in variables.items()]
        return nnx.merge(graph, leaves)

    def init_cache(rows: int, slots: int):
        return caches.init_cache(config, rows, slots, caches.cache_dtype(compute_dtype))

    def forward(params, tokens, start, cache, segment_ids=None):
        return bind(params)(tokens, start, cache, segment_ids)

    def logits(params, hidden):
        return bind(params).logits(hidden)

    return LanguageModel(config.vocab_size, init_cache, forward, logits)
