"""The layers of Qwen3 as flax.nnx modules. Attribute names are those of the checkpoints."""

import jax
import jax.numpy as jnp
from flax import nnx

from saki_jax.models import cache as caches
from saki_jax.models.attention import Span, attend_sequences, attend_span
from saki_jax.models.config import Qwen3Config
from saki_jax.models.rotary import rotate
from saki_jax.models.sharding import constrain

Rotation = tuple[jax.Array, jax.Array]  # cos and sin, [B or 1, J, C/2]


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
        span: Span,
        start: jax.Array | None,
        layer: caches.LayerCache | None,
    ) -> tuple[jax.Array, caches.LayerCache | None]:
        q, k, v = self.project(x, rotation)
        if layer is None:
            out = attend_sequences(q, k, v, span)
        else:
            layer = caches.write(layer, k, v, start)
            out = attend_span(q, *layer, span)
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

    def __call__(self, x, rotation, span, start, layer):
        attended, layer = self.self_attn(self.input_layernorm(x), rotation, span, start, layer)
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


def _whole(variable: nnx.Param, axes: tuple[str, str], dtype: jnp.dtype) -> jax.Array:
    """A weight cast to the compute dtype and then gathered over its width ("embed", fsdp).

    Said outright, because the compiler would rather move activations, or give up, for a gather
    from a table that is split both ways.
    """
    kept = (None if axis == "embed" else axis for axis in axes)
    return constrain(variable[...].astype(dtype), *kept)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float) -> jax.Array:
    return scale * jax.random.normal(rngs.params(), shape, jnp.float32)
