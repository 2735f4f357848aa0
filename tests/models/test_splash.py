"""The splash kernel, interpreted: the same as the portable way; and lowered for a TPU."""

import dataclasses
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.models import attention, splash
from saki_jax.models.attention import Span, attend, attend_sequences
from saki_jax.models.blockwise import attend_in_tiles
from saki_jax.models.config import PRESETS
from saki_jax.models.qwen3 import init_params, language_model
from saki_jax.models.segments import segment_starts
from saki_jax.models.sharding import make_mesh

interpreted = partial(splash.attend_sequences, interpret=True)
SMALL = dataclasses.replace(PRESETS["tiny"], head_dim=64)


@pytest.fixture
def small_blocks(monkeypatch):
    """The smallest blocks, so that a few hundred slots are several."""
    monkeypatch.setattr(splash, "BLOCK_LIMIT", splash.LANES)


def _ids(rows: list[list[int]], total: int) -> np.ndarray:
    """Segment ids of rows that hold sequences of these lengths and then padding."""
    ids = np.zeros((len(rows), total), np.int32)
    for row, parts in zip(ids, rows, strict=True):
        row[: sum(parts)] = np.repeat(np.arange(len(parts)) + 1, parts)
    return ids


def _span(ids: np.ndarray) -> Span:
    own = np.where(ids > 0, np.arange(ids.shape[1])[None, :], -1)
    return Span(segment_starts(jnp.asarray(ids)), jnp.asarray(own, jnp.int32))


def _arrays(rows, length, heads, groups, width):
    rng = np.random.default_rng(length)
    shapes = [(rows, length, heads, width), *[(rows, length, groups, width)] * 2]
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


@pytest.mark.parametrize(
    ("lengths", "total", "heads", "groups", "width"),
    [
        # Sequences that end inside a block, with it, and after several; one of a single token.
        ([[100, 156, 1, 90], [300, 20]], 400, 4, 2, 64),
        ([[290]], 290, 2, 2, 128),
        ([[3], [0]], 140, 2, 1, 64),
    ],
)
def test_values_and_gradients_equal_the_portable_ways(
    small_blocks, lengths, total, heads, groups, width
):
    span, arrays = _span(_ids(lengths, total)), _arrays(len(lengths), total, heads, groups, width)
    counted = (span.last >= span.first)[:, :, None, None]

    def graded(way):
        def loss(*arrays):
            return jnp.sum(jnp.where(counted, jnp.sin(way(*arrays)), 0.0))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arrays)

    ours = graded(lambda *arrays: interpreted(*arrays, *span))
    for other in (
        lambda *arrays: attend_in_tiles(*arrays, *span),
        lambda *arrays: attend(*arrays, span.visible(total)),
    ):
        theirs = graded(other)
        np.testing.assert_allclose(ours[0], theirs[0], atol=1e-3)
        for x, y in zip(ours[1], theirs[1], strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5)
            assert np.abs(y).max() > 0.1


def test_padding_gets_0_and_gives_no_gradient_whatever_comes_back(small_blocks):
    """The gradient that arrives at padding is not 0 here."""
    span, arrays = _span(_ids([[130, 60], [0]], 400)), _arrays(2, 400, 2, 1, 64)
    padding = np.asarray(span.last < span.first)
    out, pull = jax.vjp(jax.jit(lambda *arrays: interpreted(*arrays, *span)), *arrays)
    np.testing.assert_array_equal(np.asarray(out)[padding], 0.0)
    with jax.debug_nans(True):
        for grad in pull(jnp.full(out.shape, 7.0)):
            np.testing.assert_array_equal(np.asarray(grad)[padding], 0.0)
            assert np.isfinite(grad).all()


def test_blocks_of_other_sequences_are_not_read(small_blocks):
    """A value that is NaN spoils whoever reads it, even with weight 0."""
    span, (q, k, v) = _span(_ids([[256, 128]], 512)), _arrays(1, 512, 2, 1, 64)
    others = (jnp.arange(512) < 256) | (jnp.arange(512) >= 384)  # the first sequence, and padding
    k, v = (jnp.where(others[None, :, None, None], jnp.nan, x) for x in (k, v))

    def second(q, k, v):
        out = interpreted(q, k, v, *span)
        return jnp.sum(jnp.where(others[None, :, None, None], 0.0, out)), out

    (_, out), grads = jax.jit(jax.value_and_grad(second, (0, 1, 2), has_aux=True))(q, k, v)
    assert jnp.isnan(out[:, :256]).all()  # so a reader would have been seen
    for x in (out, *grads):
        assert jnp.isfinite(x[:, 256:384]).all()


def test_the_model_gives_the_same_by_the_kernel(small_blocks, monkeypatch):
    lm, params = language_model(SMALL, jnp.float32), init_params(SMALL, jax.random.key(0))
    ids = jnp.asarray(_ids([[70, 100], [150]], 180))
    tokens = jax.random.randint(jax.random.key(1), ids.shape, 0, SMALL.vocab_size)
    # Fresh functions, so that each is traced under the table of its moment.
    portable, _ = jax.jit(partial(lm.forward))(params, tokens, None, None, ids)
    monkeypatch.setitem(attention.KERNELS, "cpu", interpreted)
    ours, _ = jax.jit(partial(lm.forward))(params, tokens, None, None, ids)
    ours, portable = (np.asarray(x)[np.asarray(ids > 0)] for x in (ours, portable))
    np.testing.assert_allclose(ours, portable, atol=1e-5)
    assert (ours != portable).any()  # so that two ways were compared


@pytest.mark.parametrize("sizes", [None, (2, 2, 2)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_tpu_gets_the_kernel_forward_and_backward(eight_devices, dtype, sizes):
    """Lowered for the platform, which needs no TPU and checks the kernel's blocks and types."""
    shapes = [(4, 1000, heads, 128) for heads in (4, 2, 2)]
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    bound = jax.ShapeDtypeStruct((4, 1000), jnp.int32)

    def loss(q, k, v, first, last):
        return jnp.sum(attend_sequences(q, k, v, Span(first, last)).astype(jnp.float32))

    def lowered(platform):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays, bound, bound)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    mesh = None if sizes is None else make_mesh(*sizes, devices=eight_devices)
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        tpu, cpu = lowered("tpu"), lowered("cpu")
    assert "tpu_custom_call" not in cpu
    assert tpu.count("tpu_custom_call") == 3
    for name in ("fwd_segmented", "dq_segmented", "dkv_segmented"):
        assert f"splash_mha_{name}" in tpu


@pytest.mark.parametrize(("length", "width"), [(128, 64), (200, 16)])
def test_shapes_that_the_kernel_does_not_take_go_the_portable_way(monkeypatch, length, width):
    def kernel(*arrays):
        raise AssertionError("the kernel was called")

    monkeypatch.setitem(attention.KERNELS, "cpu", kernel)
    span, arrays = _span(_ids([[length - 5]], length)), _arrays(1, length, 2, 1, width)
    out = attend_sequences(*arrays, span)
    whole = attend(*arrays, span.visible(length))
    np.testing.assert_allclose(out[:, : length - 5], whole[:, : length - 5], atol=2e-6)
