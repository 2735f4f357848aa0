"""Several sequences in one row: each comes out as it does alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen3_checks import jitted
from saki_jax.models.config import PRESETS
from saki_jax.models.qwen3 import init_params, language_model
from saki_jax.models.segments import segment_starts
from toys import lookup_model, random_table

TINY = PRESETS["tiny"]
IDS = np.array([[1, 1, 1, 1, 1, 2, 3, 3, 3, 3, 0, 0], [4, 4, 5, 5, 5, 5, 5, 5, 5, 6, 6, 6]])
PACKED = jax.random.randint(jax.random.key(1), IDS.shape, 0, 64)


def _models() -> dict:
    return {
        "qwen3": (jitted(language_model(TINY, jnp.float32)), init_params(TINY, jax.random.key(0))),
        "toy": (lookup_model(64, order=2), random_table(0, 64, order=2)),
    }


def test_a_run_of_one_id_begins_where_the_id_changes():
    expected = [[0, 0, 0, 0, 0, 5, 6, 6, 6, 6, 10, 10], [0, 0, 2, 2, 2, 2, 2, 2, 2, 9, 9, 9]]
    np.testing.assert_array_equal(segment_starts(jnp.asarray(IDS)), expected)


@pytest.mark.parametrize("name", ["qwen3", "toy"])
def test_each_segment_equals_its_sequence_alone(name):
    lm, params = _models()[name]
    packed, none = lm.forward(params, PACKED, None, None, jnp.asarray(IDS))
    packed = lm.logits(params, packed)
    assert none is None
    for row, ids in enumerate(IDS):
        for one in set(ids.tolist()) - {0}:
            tokens = PACKED[row : row + 1, ids == one]
            alone = lm.logits(params, lm.forward(params, tokens, None, None)[0])
            np.testing.assert_allclose(packed[row, ids == one], alone[0], atol=1e-5)
    apart = lm.logits(params, lm.forward(params, PACKED, None, None)[0])
    assert np.abs(apart - packed)[0, 5:10].max() > 1e-2  # the ids do make a difference


def test_the_gradient_into_another_segment_is_exactly_zero():
    lm, params = _models()["qwen3"]
    tokens = jnp.arange(12)[None, :]  # each token once: its embedding is its own

    def one_segment(table):
        changed = params | {"embed_tokens": {"embedding": table}}
        hidden, _ = lm.forward(changed, tokens, None, None, jnp.asarray(IDS[:1]))
        return jnp.sum(hidden[:, 6:10] ** 2)

    grads = jax.jit(jax.grad(one_segment))(params["embed_tokens"]["embedding"])
    seen = np.abs(grads[:12]).max(axis=1) > 0
    np.testing.assert_array_equal(seen, IDS[0] == 3)


def test_segments_with_a_cache_are_refused():
    lm, params = _models()["qwen3"]
    with pytest.raises(ValueError, match="given was a cache as well"):
        lm.forward(params, PACKED, jnp.zeros(2, int), lm.init_cache(2, 12), jnp.asarray(IDS))
