"""One device and eight give the same numbers; what does not divide is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from qwen3_checks import jitted
from saki_jax.models.config import PRESETS
from saki_jax.models.qwen3 import init_params, language_model
from saki_jax.models.sharding import (
    batch_sharding,
    cache_shardings,
    check_batch,
    constrain,
    make_mesh,
    param_shardings,
    state_shardings,
)
from saki_jax.models.token_logprobs import token_logprobs

TINY = PRESETS["tiny"]
MESHES = [(8, 1, 1), (2, 2, 2), (1, 4, 2)]


@pytest.fixture(scope="module")
def on_one():
    """Language model, parameters, tokens [8, 10] and what one device makes of them."""
    lm, params = language_model(TINY, jnp.float32), init_params(TINY, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (8, 10), 0, TINY.vocab_size)
    return lm, params, tokens, jax.jit(_everything(lm))(params, tokens)


def _everything(lm):
    """Hidden states, a ragged cached block, and loss with gradient: all that training needs."""

    def run(params, tokens):
        def loss(params):
            hidden, _ = lm.forward(params, tokens, None, None)
            log_p, entropy = token_logprobs(
                lambda h: lm.logits(params, h), hidden, tokens[..., None], chunk=24
            )
            return log_p.mean(), (hidden, entropy)

        (value, (hidden, entropy)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        start = jnp.arange(8)
        cache = lm.init_cache(8, 10)
        _, cache = lm.forward(params, tokens[:, :7], jnp.zeros(8, jnp.int32), cache)
        block, cache = lm.forward(params, tokens[:, 7:], start, cache)
        return {
            "hidden": hidden,
            "block": lm.logits(params, block),
            "cache": cache,
            "loss": value,
            "entropy": entropy,
            "grads": grads,
        }

    return run


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_eight_devices_equal_one(on_one, eight_devices, sizes):
    lm, params, tokens, expected = on_one
    mesh = make_mesh(*sizes, devices=eight_devices)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, param_shardings(mesh, TINY))
        tokens = jax.device_put(tokens, batch_sharding(mesh))
        ours = jax.jit(_everything(lm))(params, tokens)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    rows = 8 // (sizes[0] * sizes[1])
    assert ours["hidden"].sharding.shard_shape((8, 10, 32)) == (rows, 10, 32)
    wanted = cache_shardings(mesh, TINY)
    for got, want in zip(jax.tree.leaves(ours["cache"]), jax.tree.leaves(wanted), strict=True):
        assert got.sharding.is_equivalent_to(want, 4)


def test_fresh_parameters_are_made_where_they_lie_and_are_the_same(eight_devices):
    mesh = make_mesh(2, 2, 2, devices=eight_devices)
    sharded = init_params(TINY, jax.random.key(0), mesh)
    for ours, sharding, plain in zip(
        jax.tree.leaves(sharded),
        jax.tree.leaves(param_shardings(mesh, TINY)),
        jax.tree.leaves(init_params(TINY, jax.random.key(0))),
        strict=True,
    ):
        assert ours.sharding.is_equivalent_to(sharding, ours.ndim)
        np.testing.assert_allclose(ours, plain, atol=1e-7)
    kernel = sharded["layers"]["0"]["mlp"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (16, 32)  # [32, 64] over fsdp and tensor


def test_optimizer_state_lies_as_the_parameters_do(eight_devices):
    mesh = make_mesh(2, 2, 2, devices=eight_devices)
    params = init_params(TINY, jax.random.key(0))
    state = jax.eval_shape(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init, params
    )
    shardings = state_shardings(mesh, TINY, state)
    adam = shardings[1][0]
    assert adam.mu == adam.nu == param_shardings(mesh, TINY)
    assert adam.count.spec == PartitionSpec()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((1, 1, 8), ["query heads 4", "key/value heads 2", "'tensor' of size 8"]),
        ((2, 1, 4), ["key/value heads 2 does not divide by mesh axis 'tensor' of size 4"]),
    ],
)
def test_a_dimension_that_does_not_divide_is_named_with_both_numbers(sizes, words):
    with pytest.raises(ValueError, match="does not fit this mesh") as caught:
        param_shardings(make_mesh(*sizes), TINY)
    for word in words:
        assert word in str(caught.value)


def test_j06_rows_that_do_not_divide_are_refused_with_both_numbers():
    mesh = make_mesh(4, 2, 1)
    check_batch(mesh, 16)
    with pytest.raises(ValueError, match=r"12 prompts .* = 8 devices") as caught:
        check_batch(mesh, 12, "prompts")
    assert "multiple of 8" in str(caught.value)


def test_mesh_sizes_must_fit_the_devices():
    assert dict(make_mesh(-1, 2, 1).shape) == {"data": 4, "fsdp": 2, "tensor": 1}
    assert make_mesh(1, 1, 1).size == 1
    with pytest.raises(ValueError, match="needs 12 devices, there are 8"):
        make_mesh(3, 2, 2)


def test_constrain_is_nothing_without_a_mesh_and_leaves_odd_sizes_alone():
    x = jnp.ones((5, 4))
    assert constrain(x, "batch", None) is x
    with jax.set_mesh(make_mesh(8, 1, 1)):
        np.testing.assert_array_equal(jax.jit(lambda x: constrain(x, "batch", None))(x), x)


@pytest.mark.parametrize("ways", [1, 2, 4, 8])
def test_j10_argmax_over_a_split_vocabulary_takes_the_lowest_id(ways):
    logits = np.zeros((3, 64), np.float32)
    logits[0, [9, 41]] = 1.0
    logits[1, [8, 63]] = 1.0
    mesh = make_mesh(1, 1, ways)
    split = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "tensor")))
    with jax.set_mesh(mesh):
        mode = jax.jit(lambda x: jnp.argmax(constrain(x, None, "vocab"), axis=-1))(split)
    np.testing.assert_array_equal(mode, [9, 8, 0])


def test_j10_the_head_on_a_split_vocabulary_is_float32_and_whole(on_one, eight_devices):
    _, params, tokens, _ = on_one
    lm = jitted(language_model(TINY, jnp.bfloat16))
    mesh = make_mesh(4, 1, 2, devices=eight_devices)
    plain = lm.logits(params, lm.forward(params, tokens, None, None)[0])
    lm = jitted(language_model(TINY, jnp.bfloat16))  # compiled anew, for the mesh
    with jax.set_mesh(mesh):
        params = jax.device_put(params, param_shardings(mesh, TINY))
        split = lm.logits(params, lm.forward(params, tokens, None, None)[0])
    assert split.dtype == jnp.float32
    assert split.shape == plain.shape
    np.testing.assert_allclose(split, plain, atol=0.02)  # bfloat16 activations, other sum order
