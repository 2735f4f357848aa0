import jax
import jax.numpy as jnp
import numpy as np
import optax

from saki_jax.train.optimizer import make_optimizer
from saki_jax.train.state import compute_copy, init_state


def two_hundred_steps(dtype):
    optimizer = make_optimizer(learning_rate=1e-6)
    params = {"w": jnp.full((1,), 0.02, dtype)}
    gradient = {"w": jnp.full((1,), 0.5, dtype)}

    @jax.jit
    def step(params, opt_state):
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = optimizer.init(params)
    for _ in range(200):
        params, opt_state = step(params, opt_state)
    return float(params["w"][0])


def test_r18_float32_masters_move_where_bfloat16_would_not():
    np.testing.assert_allclose(two_hundred_steps(jnp.float32), 0.01979995, atol=2e-8)
    np.testing.assert_allclose(two_hundred_steps(jnp.bfloat16), 0.0200195, atol=1e-6)


def test_r18_the_state_keeps_float32_and_computes_from_a_copy():
    state = init_state({"w": jnp.ones((2, 2), jnp.bfloat16)}, make_optimizer(learning_rate=1e-6))
    floats = jax.tree.leaves((state.params, state.opt_state))
    assert {x.dtype.name for x in floats} == {"float32", "int32"}
    assert state.params["w"].dtype == jnp.float32
    assert compute_copy(state.params, jnp.bfloat16)["w"].dtype == jnp.bfloat16


def test_weight_decay_acts_on_every_parameter():
    optimizer = make_optimizer(learning_rate=1e-2, weight_decay=0.1)
    params = {"matrix": jnp.ones((2, 2)), "scale": jnp.ones(3)}
    updates, _ = optimizer.update(
        jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
    )
    for leaf in jax.tree.leaves(updates):
        np.testing.assert_allclose(leaf, -1e-3, rtol=1e-6)


def test_the_state_owns_its_buffers():
    params = {"w": jnp.ones((2, 2))}
    optimizer = make_optimizer(learning_rate=1e-6)
    state = init_state(params, optimizer)
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state))]
    assert len(set(buffers)) == len(buffers)
