"""Attention by blocks: the same as by the whole score matrix, in less memory, of what is seen."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.models import attention, blockwise, cache
from saki_jax.models.attention import Span, attend, attend_span
from saki_jax.models.blockwise import attend_by_length, attend_in_tiles
from saki_jax.models.config import PRESETS
from saki_jax.models.qwen3 import init_params, language_model
from saki_jax.models.segments import segment_starts
from saki_jax.models.sharding import make_mesh

TINY = PRESETS["tiny"]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16, so that a handful of slots is many blocks."""
    monkeypatch.setattr(blockwise, "tile_limit", lambda: 16)
    monkeypatch.setattr(blockwise, "length_block", lambda: 16)
    monkeypatch.setattr(attention, "FEW_SLOTS", 0)


def _arrays(rows, queries, slots, heads, groups, width, dtype=jnp.float32):
    rng = np.random.default_rng(queries)
    shapes = [(rows, queries, heads, width), *[(rows, slots, groups, width)] * 2]
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def _packed(lengths: list[list[int]], total: int) -> Span:
    """Spans of rows that hold sequences of these lengths and then padding."""
    ids = np.zeros((len(lengths), total), np.int32)
    for row, parts in zip(ids, lengths, strict=True):
        row[: sum(parts)] = np.repeat(np.arange(len(parts)) + 1, parts)
    own = np.where(ids > 0, np.arange(total)[None, :], -1)
    return Span(segment_starts(jnp.asarray(ids)), jnp.asarray(own, jnp.int32))


SPANS = {
    "causal": Span(
        jnp.zeros((2, 45), jnp.int32), jnp.tile(jnp.arange(45, dtype=jnp.int32), (2, 1))
    ),
    "packed": _packed([[7, 20, 1, 9], [41]], 45),
}


@pytest.mark.parametrize(
    ("name", "heads", "groups", "width", "dtype"),
    [
        ("causal", 2, 2, 128, jnp.float32),
        ("causal", 4, 2, 64, jnp.bfloat16),
        ("packed", 4, 2, 64, jnp.float32),
        ("packed", 4, 1, 64, jnp.float32),
    ],
)
def test_tiles_equal_the_whole_matrix_in_values_and_gradients(
    small_blocks, name, heads, groups, width, dtype
):
    span, arrays = SPANS[name], _arrays(2, 45, 45, heads, groups, width, dtype)
    counted = (span.last >= span.first)[:, :, None, None]

    def graded(way):
        def loss(*arrays):
            return jnp.sum(jnp.where(counted, jnp.sin(way(*arrays).astype(jnp.float32)), 0.0))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arrays)

    tiled = graded(lambda q, k, v: attend_in_tiles(q, k, v, *span))
    whole = graded(lambda q, k, v: attend(q, k, v, span.visible(45)))
    rounding = 2e-5 if dtype == jnp.float32 else 0.1
    np.testing.assert_allclose(tiled[0], whole[0], atol=50 * rounding)
    for ours, theirs in zip(tiled[1], whole[1], strict=True):
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, atol=rounding)
        assert np.abs(theirs).max() > 0.1


def test_tiles_of_other_segments_and_of_padding_are_not_read(small_blocks):
    """A value that is NaN spoils whoever reads it, even with weight 0."""
    span, (q, k, v) = _packed([[16, 32]], 64), _arrays(1, 64, 64, 4, 2, 8)
    others = (jnp.arange(64) < 16) | (jnp.arange(64) >= 48)  # the first segment, and padding
    k, v = (jnp.where(others[None, :, None, None], jnp.nan, x) for x in (k, v))

    def second(q, k, v):
        out = attend_in_tiles(q, k, v, *span)
        return jnp.sum(jnp.where(others[None, :, None, None], 0.0, out)), out

    (_, out), grads = jax.jit(jax.value_and_grad(second, (0, 1, 2), has_aux=True))(q, k, v)
    assert jnp.isfinite(out[:, 16:48]).all()
    assert jnp.isnan(out[:, :16]).all()  # so a reader would have been seen
    np.testing.assert_array_equal(out[:, 48:], 0.0)
    for grad in grads:
        assert jnp.isfinite(grad[:, 16:48]).all()


def test_a_query_that_sees_nothing_gets_0_and_gives_no_gradient(small_blocks):
    nothing = Span(jnp.full((1, 20), 5, jnp.int32), jnp.full((1, 20), 4, jnp.int32))
    arrays = _arrays(1, 20, 20, 2, 1, 8)
    with jax.debug_nans(True):
        for way in (attend_in_tiles, attend_by_length):
            np.testing.assert_array_equal(way(*arrays, *nothing), 0.0)
        total = lambda *arrays: attend_in_tiles(*arrays, *nothing).sum()  # noqa: E731
        for grad in jax.grad(total, (0, 1, 2))(*arrays):
            np.testing.assert_array_equal(grad, 0.0)


@pytest.mark.parametrize("queries", [1, 8])
def test_by_length_equals_the_whole_matrix_over_poisoned_slots(small_blocks, queries):
    q, k, v = _arrays(3, queries, 60, 4, 2, 16)
    start = jnp.array([0, 17, 52])  # the last row ends with the slots
    own = start[:, None] + jnp.arange(queries)[None, :]
    stale = (jnp.arange(60)[None, :] > own[:, -1:])[:, :, None, None]
    poisoned = jnp.where(stale, jnp.nan, k), jnp.where(stale, 1e30, v)
    ours = jax.jit(attend_by_length)(q, *poisoned, jnp.zeros_like(own), own)
    whole = attend(q, k, v, Span(jnp.zeros_like(own), own).visible(60))
    np.testing.assert_allclose(ours, whole, atol=2e-6)
    # A row's result is its own, to the bit, however far the longest row reaches.
    alone = jax.jit(attend_by_length)(
        q[:1], *(x[:1] for x in poisoned), jnp.zeros_like(own[:1]), own[:1]
    )
    np.testing.assert_array_equal(ours[:1], alone)


def test_by_length_reads_no_block_behind_the_longest_row(small_blocks):
    q, k, v = _arrays(2, 1, 64, 4, 2, 16)
    own = jnp.array([[3], [31]])
    behind = (jnp.arange(64) >= 32)[None, :, None, None]
    out = attend_by_length(q, k, jnp.where(behind, jnp.nan, v), jnp.zeros_like(own), own)
    assert jnp.isfinite(out).all()
    out = attend_by_length(q, k, jnp.where(behind, jnp.nan, v), jnp.zeros_like(own), own + 1)
    assert jnp.isnan(out[0]).any()  # so a reader would have been seen


@pytest.mark.parametrize(("way", "growth"), [("span", (0, 4.5)), ("whole", (12, 17))])
def test_memory_of_value_and_gradient_is_linear_in_the_length(way, growth):
    def temporary(length: int) -> int:
        own = jnp.arange(length, dtype=jnp.int32)[None, :]
        span = Span(jnp.zeros_like(own), own)

        def loss(q, k, v):
            by = attend_span if way == "span" else lambda *a: attend(*a[:3], a[3].visible(length))
            return jnp.sum(by(q, k, v, span) ** 2)

        shapes = [(1, length, heads, 64) for heads in (4, 2, 2)]
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert growth[0] < temporary(4096) / temporary(1024) < growth[1]


def test_decoding_copies_no_cache():
    """In the loop of the engine: write a token, attend; the cache is the loop's own buffer."""
    shape = (2, 2048, 2, 64)

    def decode(layer, q, new, start):
        def step(carry):
            i, layer, _ = carry
            layer = cache.write(layer, new, new, start + i)
            own = (start + i)[:, None]
            return i + 1, layer, attend_span(q, *layer, Span(jnp.zeros_like(own), own))

        return jax.lax.while_loop(lambda carry: carry[0] < 9, step, (0, layer, q))

    new, q = jnp.zeros((2, 1, 2, 64)), jnp.zeros((2, 1, 4, 64))
    layer = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for _ in range(2))
    compiled = jax.jit(decode, donate_argnums=0).lower(layer, q, new, jnp.zeros(2, int)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < np.prod(shape) * 4 / 2
    assert "copy(f32[2,2048" not in compiled.as_text()


@pytest.mark.parametrize("queries", [1, 40])
def test_devices_work_on_their_own_rows_and_heads(small_blocks, eight_devices, queries):
    arrays = _arrays(4, queries, 40, 4, 2, 16)
    own = jnp.array([3, 39, 0, 20])[:, None] * jnp.ones((1, queries), jnp.int32)
    run = jax.jit(lambda *arrays: attend_span(*arrays, Span(jnp.zeros_like(own), own)))
    expected = run(*arrays)
    run = jax.jit(lambda *arrays: attend_span(*arrays, Span(jnp.zeros_like(own), own)))
    mesh = make_mesh(2, 2, 2, devices=eight_devices)
    place = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(("data", "fsdp"), None, "tensor", None)
    )
    with jax.set_mesh(mesh):
        arrays = jax.device_put(arrays, place)
        ours = run(*arrays)
        text = run.lower(*arrays).compile().as_text()
    assert ours.sharding.is_equivalent_to(place, 4)
    np.testing.assert_allclose(ours, expected, atol=1e-6)
    for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert word not in text


def test_the_model_gives_the_same_by_blocks(small_blocks, monkeypatch):
    lm, params = language_model(TINY, jnp.float32), init_params(TINY, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 40), 0, TINY.vocab_size)
    # Fresh functions, so that each is traced under the thresholds of its moment.
    forward = jax.jit(partial(lm.forward))
    parts, at, layers = [], 0, lm.init_cache(2, 48)
    for count in (30, 1, 8, 1):
        fed = tokens[:, at : at + count]
        out, layers = forward(params, fed, jnp.full(2, at), layers)
        parts.append(out)
        at += count
    whole, _ = forward(params, tokens, None, None)
    monkeypatch.setattr(attention, "FEW_SLOTS", 64)
    plain, _ = jax.jit(partial(lm.forward))(params, tokens, None, None)
    np.testing.assert_allclose(whole, plain, atol=1e-5)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), plain, atol=1e-5)
