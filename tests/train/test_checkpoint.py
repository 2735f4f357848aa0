import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.train.checkpoint import CheckpointError, Checkpoints
from saki_jax.train.optimizer import make_optimizer
from saki_jax.train.state import init_state

OPTIMIZER = make_optimizer(learning_rate=1e-3)


def state_of(value: float, width: int = 8):
    return init_state({"a": jnp.full((3, width), value), "b": {"c": jnp.ones(2)}}, OPTIMIZER)


def template_of(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


TEMPLATE = state_of(0.0)


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path / "checkpoints", keep=2, keep_steps=(1,))
    yield made
    made.close()


def save(checkpoints, *steps):
    for step in steps:
        checkpoints.save(step, state_of(float(step)), {"step": step, "data": {"next_step": step}})


def restore(checkpoints):
    """As the next process would: with a manager that has saved nothing."""
    fresh = Checkpoints(checkpoints.folder, keep=2, keep_steps=(1,))
    try:
        return fresh.restore(template_of(TEMPLATE))
    finally:
        fresh.close()
        checkpoints.reload()


def test_nothing_saved_is_none(checkpoints):
    assert restore(checkpoints) is None


def test_state_and_record_come_back(checkpoints):
    save(checkpoints, 7)
    state, record = restore(checkpoints)
    assert record == {"step": 7, "data": {"next_step": 7}}
    for got, put in zip(jax.tree.leaves(state), jax.tree.leaves(state_of(7.0)), strict=True):
        assert got.dtype == put.dtype
        np.testing.assert_array_equal(got, put)


def test_the_newest_and_the_marked_ones_stay(checkpoints):
    save(checkpoints, 1, 2, 3, 4)
    assert checkpoints.steps() == [1, 3, 4]


def torn_file(folder, step, how):
    files = sorted((folder / str(step) / "state" / "d").iterdir())
    if how == "missing":
        files[0].unlink()
    elif how == "short":
        files[0].write_bytes(files[0].read_bytes()[:-1])
    elif how == "unfinished":
        (folder / str(step) / "sizes.json").unlink()
    else:
        shutil.rmtree(folder / str(step) / "state")


@pytest.mark.parametrize("how", ["missing", "short", "unfinished", "empty"])
def test_c02_a_torn_checkpoint_is_said_to_be_and_the_one_before_it_serves(checkpoints, how, caplog):
    save(checkpoints, 10, 20)
    torn_file(checkpoints.folder, 20, how)
    state, record = restore(checkpoints)
    assert record["step"] == 10
    assert state.params["a"][0, 0] == 10.0
    assert "torn" in caplog.text
    assert "step 10" in caplog.text
    # Steps behind it can be saved again.
    save(checkpoints, 15, 20)
    assert restore(checkpoints)[1]["step"] == 20


def test_c02_never_from_scratch_in_silence(checkpoints):
    save(checkpoints, 10)
    torn_file(checkpoints.folder, 10, "missing")
    with pytest.raises(CheckpointError, match="every checkpoint"):
        restore(checkpoints)


def test_c08_debris_of_a_crash_is_no_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    (folder / "20.orbax-checkpoint-tmp-123").mkdir(parents=True)
    checkpoints = Checkpoints(folder, keep=2)
    assert restore(checkpoints) is None
    save(checkpoints, 20)
    assert restore(checkpoints)[1]["step"] == 20
    checkpoints.close()


def test_c09_a_save_that_orbax_leaves_out_is_an_error(checkpoints):
    save(checkpoints, 30)
    with pytest.raises(CheckpointError, match=r"step 25 .* steps \[30\]"):
        save(checkpoints, 25)


def test_c10_another_dtype_is_refused(checkpoints):
    save(checkpoints, 5)
    template = template_of(TEMPLATE)
    template = template.replace(step=jax.ShapeDtypeStruct((), jnp.float32))
    with pytest.raises(CheckpointError, match=r"step is int32\[\] there and float32\[\] here"):
        checkpoints.restore(template)


def test_c10_another_shape_is_refused_with_both(checkpoints):
    save(checkpoints, 5)
    with pytest.raises(CheckpointError, match=r"params\.a is float32\[3, 8\] .* float32\[3, 16\]"):
        checkpoints.restore(template_of(state_of(0.0, width=16)))


def test_c10_a_missing_array_is_refused(checkpoints):
    save(checkpoints, 5)
    state = init_state({"a": jnp.ones((3, 8)), "b": {"d": jnp.ones(2)}}, OPTIMIZER)
    with pytest.raises(CheckpointError, match=r"b\.d is missing there"):
        checkpoints.restore(template_of(state))
