"""Rows in lines: every token once, nothing else, and few slots left empty."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.models.sharding import batch_sharding, make_mesh
from saki_jax.rollout.packing import Shape, join, pack, packed_sequences, shape_for
from toys import prompts_of

P, T = 6, 20


def batch(lengths, seed=0):
    """Prompts and responses [B, T] of tokens that are all different, with junk behind the ends."""
    rng = np.random.default_rng(seed)
    prompt_length = rng.integers(1, P + 1, len(lengths))
    ids = iter(range(1, 10**6))
    prompts = prompts_of([[next(ids) for _ in range(n)] for n in prompt_length], width=P)
    tokens = np.full((len(lengths), T), -7, np.int32)
    for row, n in zip(tokens, lengths, strict=True):
        row[:n] = [next(ids) for _ in range(n)]
    return prompts, jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32)


@functools.partial(jax.jit, static_argnums=3)
def packed(prompts, tokens, lengths, shape):
    packing = pack(prompts, lengths, shape)
    return packing, *packed_sequences(packing, prompts, tokens)


def segments(sequence, segment):
    """Every run of one segment id in the lines, as a list of tokens."""
    runs = []
    for ids, names in zip(
        np.asarray(sequence).reshape(-1, sequence.shape[-1]),
        np.asarray(segment).reshape(-1, sequence.shape[-1]),
        strict=True,
    ):
        held = names[names > 0]
        assert (np.diff(held) >= 0).all()  # rising along the line, so a run is one row
        assert (ids[names == 0] == 0).all()
        runs += [ids[names == name].tolist() for name in np.unique(held)]
        for name in np.unique(held):
            assert (np.diff(np.flatnonzero(names == name)) == 1).all()
    return runs


LENGTHS = {
    "mixed": [3, 20, 1, 7, 0, 12, 20, 2, 9, 1],
    "all longest": [T] * 9,
    "a bit over half": [11] * 8,
    "empty": [0, 0, 0],
    "one": [5],
}


@pytest.mark.parametrize("tokens", [60, 10_000])
@pytest.mark.parametrize("name", LENGTHS)
def test_every_row_lies_in_one_piece_and_once(name, tokens):
    prompts, responses, lengths = batch(LENGTHS[name])
    shape = shape_for(len(lengths), P + T - 1, tokens)
    packing, sequence, segment = packed(prompts, responses, lengths, shape)
    joined = np.asarray(join(prompts, responses))
    expected = [
        row[: p + r - 1].tolist()
        for row, p, r in zip(joined, np.asarray(prompts.length), LENGTHS[name], strict=True)
        if r > 0
    ]
    assert sorted(segments(sequence, segment)) == sorted(expected)
    # The passes that are made hold everything.
    assert not np.asarray(segment)[int(packing.passes) :].any()
    assert int(packing.passes) == 0 or np.asarray(segment)[int(packing.passes) - 1].any()


@pytest.mark.parametrize(("tokens", "shards"), [(1, 1), (70, 1), (300, 2)])
def test_no_lengths_overflow_the_lines(tokens, shards):
    rows = 13
    shape = shape_for(rows, P + T - 1, tokens, shards)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        prompts, responses, lengths = batch(rng.integers(0, T + 1, rows), seed)
        _, sequence, segment = packed(prompts, responses, lengths, shape)
        fed = np.where(lengths > 0, np.asarray(prompts.length) + lengths - 1, 0)
        assert (np.asarray(segment) > 0).sum() == fed.sum()
        assert len(segments(sequence, segment)) == (fed > 0).sum()


def test_a_field_stands_where_its_token_is_predicted_and_comes_back():
    prompts, responses, lengths = batch(LENGTHS["mixed"])
    shape = shape_for(len(lengths), P + T - 1, 60)
    packing, sequence, _ = packed(prompts, responses, lengths, shape)
    slots = packing.response_slots(T)
    target = packing.spread(responses, slots)
    # All ids are different: the token in the slot is the one before the target in its row.
    before = dict(zip(np.asarray(target).ravel(), np.asarray(sequence).ravel(), strict=True))
    for b, n in enumerate(LENGTHS["mixed"]):
        row = [int(prompts.tokens[b, int(prompts.length[b]) - 1]), *responses[b, :n].tolist()]
        assert [before[token] for token in row[1:]] == row[:-1]
    back = np.asarray(packing.collect(target, slots))
    valid = np.arange(T)[None] < np.asarray(lengths)[:, None]
    np.testing.assert_array_equal(back, np.where(valid, responses, 0))


def passes_needed(lengths, tokens, shape=None):
    prompts, responses, lengths = batch(lengths)
    prompts = prompts.replace(length=jnp.ones_like(prompts.length))
    shape = shape or shape_for(len(lengths), T, tokens)
    return int(packed(prompts, responses, lengths, shape)[0].passes)


def test_passes_follow_the_tokens_not_the_rows():
    """The same 640 tokens in rows of equal, different and extremely different length."""
    splits = {
        "even": [10] * 64,
        "a bit over half a line's unit": [11] * 58 + [2],
        "heavy": [20] * 16 + [10] * 24 + [4] * 16 + [2] * 8,
        "extreme": [20] * 30 + [2] * 15 + [1] * 10,
    }
    assert {sum(lengths) for lengths in splits.values()} == {640}
    rows = 64
    shape = shape_for(rows, T, 4 * T)
    least = 640 / (shape.lines * shape.width)
    needed = {
        name: passes_needed([*lengths, *[0] * (rows - len(lengths))], 4 * T, shape)
        for name, lengths in splits.items()
    }
    assert max(needed.values()) <= 1.3 * min(needed.values())
    assert min(needed.values()) >= least
    assert passes_needed([10] * 16 + [0] * 48, 4 * T, shape) == 2


def test_the_budget_decides_the_shape_of_a_pass():
    assert shape_for(512, 8192, 65536) == Shape(passes=64, lines=2, width=32768)
    assert shape_for(512, 8192, 65536, shards=16) == Shape(passes=32, lines=16, width=8192)
    # Never less than one row of the greatest length a device, never more than the batch needs.
    assert shape_for(8, 100, 1) == Shape(passes=8, lines=1, width=100)
    assert shape_for(8, 100, 1, shards=4) == Shape(passes=2, lines=4, width=100)
    assert shape_for(8, 100, 10**9) == Shape(passes=1, lines=2, width=400)


@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 2, 2)])
def test_lines_on_eight_devices_are_those_of_one(eight_devices, mesh):
    prompts, responses, lengths = batch([3, 20, 1, 7, 0, 12, 20, 2] * 2)
    shape = shape_for(16, P + T - 1, 400, shards=8)
    expected = packed(prompts, responses, lengths, shape)
    mesh = make_mesh(*mesh, devices=eight_devices)
    with jax.set_mesh(mesh):
        put = jax.tree.map(
            lambda x: jax.device_put(x, batch_sharding(mesh)), (prompts, responses, lengths)
        )
        packing, sequence, segment = packed(*put, shape)
    np.testing.assert_array_equal(sequence, expected[1])
    np.testing.assert_array_equal(segment, expected[2])
    assert int(packing.passes) == int(expected[0].passes)
    # One line of a pass a device of (data, fsdp).
    lines = shape.lines // (mesh.shape["data"] * mesh.shape["fsdp"])
    assert sequence.sharding.shard_shape(sequence.shape) == (shape.passes, lines, shape.width)


def test_join_leaves_no_gap_between_prompt_and_response():
    prompts = prompts_of([[1, 2, 3], [4]], width=4)
    joined = join(prompts, jnp.array([[5, 6, 7], [8, 9, 10]]))
    assert joined.shape == (2, 6)
    assert joined[0].tolist() == [1, 2, 3, 5, 6, 7]
    assert joined[1, :4].tolist() == [4, 8, 9, 10]
