"""Qwen3 (and, without q/k norm, Llama) as flax.nnx modules, and as a `LanguageModel`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from saki_jax.models import cache as caches
from saki_jax.models.attention import attend
from saki_jax.models.config import Qwen3Config
from saki_jax.models.lm import LanguageModel, Params
from saki_jax.models.parameters import describe, lookup, nest
from saki_jax.models.rotary import rotary_tables, rotate
from saki_jax.models.sharding import constrain, param_shardings

Rotation = tuple[jax.Array, jax.Array]  # cos and sin, [B or 1, J, C/2]


def default_compute_dtype() -> jnp.dtype:
    """bfloat16 on accelerators; float32 on CPU, which is slower in bfloat16."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


class RMSNorm(nnx.Module):
    """x / sqrt(mean x² + eps) times a learnt scale, in float32 inside."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), axes=(None,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * scale).astype(x.dtype)


class Linear(nnx.Module):
    """x @ kernel without bias; the kernel is [in, out] and is cast to x's dtype."""

    def __init__(self, shape: tuple[int, int], axes: tuple[str, str], scale: float, rngs: nnx.Rngs):
        self.kernel = nnx.Param(_normal(rngs, shape, scale), axes=axes)
        self.axes = axes

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.dot(x, self.matrix(x.dtype))

    def matrix(self, dtype: jnp.dtype) -> jax.Array:
        """The kernel for use in a product, [in, out]."""
        return _whole(self.kernel, self.axes, dtype)


class Attention(nnx.Module):
    """Per-head q/k RMSNorm, then rotation, then grouped-query attention."""

    def __init__(self, config: Qwen3Config, rngs: nnx.Rngs):
        width, scale = config.hidden_size, config.initializer_range
        q_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.q_proj = Linear((width, q_width), ("embed", "heads"), scale, rngs)
        self.k_proj = Linear((width, kv_width), ("embed", "kv_heads"), scale, rngs)
        self.v_proj = Linear((width, kv_width), ("embed", "kv_heads"), scale, rngs)
        self.o_proj = Linear((q_width, width), ("heads", "embed"), scale, rngs)
        norm = (config.head_dim, config.rms_norm_eps)
        self.q_norm = RMSNorm(*norm) if config.qk_norm else None
        self.k_norm = RMSNorm(*norm) if config.qk_norm else None
        self.head_dim = config.head_dim

    def project(self, x: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, J, D] -> q [B, J, H, C], k and v [B, J, G, C]; q and k normalised, then rotated."""
        split = (*x.shape[:2], -1, self.head_dim)
        q = constrain(self.q_proj(x).reshape(split), "batch", None, "heads", None)
        k = constrain(self.k_proj(x).reshape(split), "batch", None, "kv_heads", None)
        v = constrain(self.v_proj(x).reshape(split), "batch", None, "kv_heads", None)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, *rotation), rotate(k, *rotation), v

    def __call__(
        self,
        x: jax.Array,
        rotation: Rotation,
        visible: jax.Array,
        start: jax.Array | None,
        layer: caches.LayerCache | None,
    ) -> tuple[jax.Array, caches.LayerCache | None]:
        q, k, v = self.project(x, rotation)
        if layer is not None:
            layer = caches.write(layer, k, v, start)
            k, v = layer
        out = attend(q, k, v, visible)
        return self.o_proj(out.reshape(*x.shape[:2], -1)), layer


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, config: Qwen3Config, rngs: nnx.Rngs):
        wide = (config.hidden_size, config.intermediate_size)
        scale = config.initializer_range
        self.gate_proj = Linear(wide, ("embed", "feed_forward"), scale, rngs)
        self.up_proj = Linear(wide, ("embed", "feed_forward"), scale, rngs)
        self.down_proj = Linear(wide[::-1], ("feed_forward", "embed"), scale, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jax.nn.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(constrain(hidden, "batch", None, "feed_forward"))


class Block(nnx.Module):
    """A pre-norm transformer layer."""

    def __init__(self, config: Qwen3Config, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, rngs)

    def __call__(self, x, rotation, visible, start, layer):
        attended, layer = self.self_attn(self.input_layernorm(x), rotation, visible, start, layer)
        x = constrain(x + attended, "batch", None, None)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return constrain(x, "batch", None, None), layer


class Embedding(nnx.Module):
    """The token table [V, D]."""

    def __init__(self, config: Qwen3Config, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.hidden_size)
        values = _normal(rngs, shape, config.initializer_range)
        self.embedding = nnx.Param(values, axes=("vocab", "embed"))

    def __call__(self, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
        # Clipped: padding may hold any id, and a filled NaN would spread through 0 * NaN.
        # Cast afterwards: the gradients of a token's many uses then add up in float32.
        rows = jnp.take(self.matrix(self.embedding.dtype), tokens, axis=0, mode="clip")
        return constrain(rows.astype(dtype), "batch", None, None)

    def matrix(self, dtype: jnp.dtype) -> jax.Array:
        """The table for use in a product, [V, D]."""
        return _whole(self.embedding, ("vocab", "embed"), dtype)


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

    def __call__(self, tokens, start=None, cache=None):
        """Hidden states after the last norm, [B, J, D]; see `LanguageModel.forward`."""
        offsets = jnp.arange(tokens.shape[1])[None, :]
        if cache is None:
            positions, slots = offsets, tokens.shape[1]
        else:
            positions, slots = start[:, None] + offsets, cache[0][0].shape[1]
        # A token sees the slots up to its own position; later ones hold what was rolled back.
        visible = jnp.arange(slots)[None, None, :] <= positions[:, :, None]
        rotation = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        x = self.embed_tokens(tokens, self.compute_dtype)
        if cache is None:
            for block in self.layers:
                run = lambda x, block=block: block(x, rotation, visible, None, None)[0]  # noqa: E731
                x = jax.checkpoint(run)(x) if self.remat else run(x)
            return self.norm(x), None
        new_cache = []
        for block, layer in zip(self.layers, cache, strict=True):
            x, layer = block(x, rotation, visible, start, layer)
            new_cache.append(layer)
        return self.norm(x), tuple(new_cache)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[*B, D] -> [*B, V] float32. Logits rounded to bfloat16 alone cost a TV of 0.0065."""
        if self.lm_head is None:
            matrix, equation = self.embed_tokens.matrix(hidden.dtype), "...d,vd->...v"
        else:
            matrix, equation = self.lm_head.matrix(hidden.dtype), "...d,dv->...v"
        return jnp.einsum(equation, hidden, matrix, preferred_element_type=jnp.float32)


def _whole(variable: nnx.Param, axes: tuple[str, str], dtype: jnp.dtype) -> jax.Array:
    """A weight cast to the compute dtype and then gathered over its width ("embed", fsdp).

    Said outright, because the compiler would rather move activations, or give up, for a gather
    from a table that is split both ways.
    """
    kept = (None if axis == "embed" else axis for axis in axes)
    return constrain(variable[...].astype(dtype), *kept)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float) -> jax.Array:
    return scale * jax.random.normal(rngs.params(), shape, jnp.float32)


def abstract_module(
    config: Qwen3Config, compute_dtype: jnp.dtype | None = None, remat: bool = False
) -> Qwen3:
    """The module with shapes in place of arrays."""
    return nnx.eval_shape(
        lambda: Qwen3(config, nnx.Rngs(params=0), compute_dtype=compute_dtype, remat=remat)
    )


def init_params(config: Qwen3Config, key: jax.Array, mesh: jax.sharding.Mesh | None = None) -> Any:
    """Fresh float32 parameters as a plain nested dict; on a mesh, each made where it will lie."""

    def draw(key: jax.Array) -> dict:
        _, state = nnx.split(Qwen3(config, nnx.Rngs(params=key)))
        flat = {
            tuple(str(k) for k in path): variable[...]
            for path, variable in nnx.to_flat_state(state)
        }
        return nest(flat)

    shardings = None if mesh is None else param_shardings(mesh, config)
    return jax.jit(draw, out_shardings=shardings)(key)


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
    graph, abstract = nnx.split(abstract_module(config, compute_dtype, remat))
    compute_dtype = jnp.dtype(compute_dtype or default_compute_dtype())
    paths = {
        tuple(str(k) for k in path): variable for path, variable in nnx.to_flat_state(abstract)
    }

    def bind(params: Params) -> Qwen3:
        leaves = [variable.replace(lookup(params, path)) for path, variable in paths.items()]
        return nnx.merge(graph, leaves)

    def init_cache(rows: int, slots: int):
        return caches.init_cache(config, rows, slots, caches.cache_dtype(compute_dtype))

    def forward(params, tokens, start, cache):
        return bind(params)(tokens, start, cache)

    def logits(params, hidden):
        return bind(params).logits(hidden)

    assert len(paths) == len(describe(config))
    return LanguageModel(config.vocab_size, init_cache, forward, logits)
