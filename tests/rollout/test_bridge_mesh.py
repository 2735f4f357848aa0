"""Bridge, draws and residuals on a mesh of eight: the same results, and no logits are gathered."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bridge_corpus import pair
from saki_jax.models.sharding import make_mesh
from saki_jax.rollout import bridge, coupling
from saki_jax.rollout.bridge_survey import survey
from saki_jax.rollout.keys import Purpose, position_keys, step_key

B, K, V = 8, 2, 8192
TILE = 1024


@jax.jit
def event(a, b, ids, key):
    """All that a wave computes from the logits."""
    solved = bridge.solve(a, b, jnp.float32(0.02), tile=TILE)
    terms = bridge.token_terms(solved, a, b, ids)
    keys = position_keys(key, ids, ids, Purpose.RESIDUAL)
    token, found = coupling.draw_residual(solved, a, b, keys)
    numbers = (solved.beta, solved.kl, solved.tv, solved.entropy, *terms)
    return numbers, (solved.teacher_mode, token, found, coupling.draw(a, keys))


def logits():
    return [jnp.asarray(x).reshape(B, K, V) for x in pair("zipf", B * K, V, "float32")]


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 8)], ids=str)
def test_a_mesh_changes_nothing_and_moves_no_logits(eight_devices, shape):
    a, b = logits()
    ids = jnp.arange(B * K, dtype=jnp.int32).reshape(B, K) * 500
    key = step_key(0, 1)
    numbers, choices = event(a, b, ids, key)
    mesh = make_mesh(*shape, eight_devices)
    rows = ("data", "fsdp")
    with jax.set_mesh(mesh):
        spread = NamedSharding(mesh, PartitionSpec(rows, None, "tensor"))
        a, b = jax.device_put((a, b), spread)
        ids = jax.device_put(ids, NamedSharding(mesh, PartitionSpec(rows)))
        compiled = event.lower(a, b, ids, key).compile()
        numbers_there, choices_there = compiled(a, b, ids, key)
    for one, other in zip(numbers, numbers_there, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    for one, other in zip(choices, choices_there, strict=True):
        np.testing.assert_array_equal(one, other)
    moved = re.findall(r"= \w+\[([\d,]*)\]\S* (?:all-gather|all-to-all)\(", compiled.as_text())
    largest = max([int(np.prod([int(n) for n in s.split(",") if n])) for s in moved] + [0])
    assert largest <= B * K * 8  # one number a row and device, not the 131,072 logits


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_j10_ties_of_the_teacher_mode_across_shards(eight_devices, shards):
    teacher = np.zeros((3, 64), np.float32)
    teacher[0, [9, 41]] = teacher[1, [8, 63]] = 2
    mesh = make_mesh(1, 1, shards, eight_devices)
    with jax.set_mesh(mesh):
        spread = NamedSharding(mesh, PartitionSpec(None, "tensor"))
        student, teacher = jax.device_put((np.zeros_like(teacher), teacher), spread)
        mode = jax.jit(lambda a, b: survey(a, b, tile=16).teacher_mode)(student, teacher)
        assert np.asarray(mode).tolist() == [9, 8, 0]
