"""Strict JAX for the whole suite: eight CPU devices, exact matmuls, no silent rank promotion.

The types written at the public functions of `rollout` and `train` are checked while tests run.
"""

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "raise")

install_import_hook(["saki_jax.rollout", "saki_jax.train"], "beartype.beartype")


@pytest.fixture
def eight_devices() -> list:
    """The eight fake CPU devices."""
    devices = jax.devices()
    assert len(devices) == 8
    return devices
