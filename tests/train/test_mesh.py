"""The quickstart's first steps on other meshes: tokens of one device, its loss within 1e-5."""

import functools
import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

from saki_jax.rollout.keys import step_key
from saki_jax.train import setup
from saki_jax.train.schedule import epsilon_at
from saki_jax.train.validate import validate

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.py"


def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", QUICKSTART)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


@functools.cache
def three_steps(data, fsdp, tensor):
    """(tokens, corrections, loss) of the first three steps."""
    config = quickstart()
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = data, fsdp, tensor
    config.eval.source = "file"
    config.rollout.compact = 0  # each number of slots is one more program, here for eight devices
    validate(config)
    session = setup.build(config)
    found = []
    with jax.set_mesh(session.pair.mesh):
        state = session.initial()
        for step in (1, 2, 3):
            rollout = session.rollout(
                session.copy(state.params),
                session.pair.teacher_params,
                session.next_prompts(),
                epsilon_at(config.epsilon.to_dict(), step),
                step_key(config.seed, step),
            )
            rollout = session.lay_out(rollout)
            state, stats = session.update(state, rollout, step_key(config.seed, step))
            found.append(jax.device_get((rollout.tokens, rollout.corrected, stats["loss"])))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 2, 2)])
def test_j09_eight_devices_give_the_tokens_and_the_loss_of_one(eight_devices, mesh):
    for (tokens, corrected, loss), expected in zip(
        three_steps(*mesh), three_steps(1, 1, 1), strict=True
    ):
        np.testing.assert_array_equal(tokens, expected[0])
        np.testing.assert_array_equal(corrected, expected[1])
        np.testing.assert_allclose(loss, expected[2], atol=1e-5)
