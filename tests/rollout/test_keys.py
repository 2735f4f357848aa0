"""Randomness belongs to (seed, step, sequence, position, purpose) and to nothing else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.rollout.keys import Purpose, gumbel, position_keys, step_key, uniform
from saki_jax.rollout.noise import gumbel_from_bits, threefry


def words(keys) -> list[tuple[int, int]]:
    return [tuple(w) for w in np.asarray(jax.random.key_data(keys)).reshape(-1, 2).tolist()]


def test_every_meaning_has_a_key_of_its_own():
    sequence, position = (jnp.asarray(x) for x in np.mgrid[:6, :7])
    keys = []
    for seed, step, purpose in itertools.product((0, 1), (1, 2), Purpose):
        keys += words(position_keys(step_key(seed, step), sequence, position, purpose))
    assert len(set(keys)) == len(keys) == 2 * 2 * len(Purpose) * 42


def test_s15_a_row_keeps_its_key_whatever_stands_beside_it():
    key, draft = step_key(3, 9), Purpose.DRAFT
    ids, at = jnp.array([[7, 7], [8, 2]]), jnp.array([[0, 1], [5, 3]])
    together = words(position_keys(key, ids, at, draft))
    alone = [
        words(position_keys(key, i[None], p[None], draft))[0]
        for i, p in zip(ids.reshape(-1), at.reshape(-1), strict=True)
    ]
    assert together == alone
    reverse = words(position_keys(key, ids[::-1, ::-1], at[::-1, ::-1], draft))
    assert reverse == together[::-1]


def test_keys_do_not_depend_on_a_jax_default():
    key = step_key(0, 1)
    with jax.default_prng_impl("rbg"):
        assert words(step_key(0, 1)) == words(key)


def test_gumbel_refuses_keys_of_another_generator():
    with pytest.raises(ValueError, match="step_key"):
        gumbel(jax.random.split(jax.random.key(0, impl="rbg"), 2), 5)


def test_uniform_has_24_bits_and_is_never_one():
    keys = position_keys(
        step_key(0, 1), jnp.arange(300_000), jnp.zeros(300_000, jnp.int32), Purpose.ACCEPT
    )
    v = np.asarray(uniform(keys), np.float64)
    assert (v * 2**24 == np.floor(v * 2**24)).all()
    assert v.min() >= 0
    assert v.max() < 1
    # Mean and variance within 5 sigma of 1/2 and 1/12 (failure probability 1e-6).
    assert abs(v.mean() - 0.5) < 5 * np.sqrt(1 / 12 / len(v))
    assert abs((v**2).mean() - 1 / 3) < 5 * np.sqrt(4 / 45 / len(v))
    # What would go wrong with 32 bits:
    assert np.float32(2**32 - 1) * np.float32(2.0**-32) == 1


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_vectors(key, counter, expected):
    """The known answers of Random123 for threefry2x32, 20 rounds."""
    key, counter = (tuple(jnp.uint32(w) for w in pair) for pair in (key, counter))
    assert tuple(int(w) for w in threefry(key, counter)) == expected


def test_gumbel_is_the_quantile_function_of_its_bits():
    """Against float64, over the whole range of the uniform, and finite at both ends."""
    rng = np.random.default_rng(0)
    high = np.concatenate(
        [[0, 0, 1, 2**31 - 1, 2**31, 2**32 - 1], rng.integers(2**32, size=2000)]
        + [rng.integers(2**k, size=50) for k in range(1, 32)]
    ).astype(np.uint32)
    low = rng.integers(2**32, size=len(high)).astype(np.uint32)
    low[:2] = 0, 2**32 - 1
    w = np.where(
        high < 2**31,
        (high >> 1) * 2.0**-31 + (low >> 1) * 2.0**-62 + 2.0**-64,
        (high >> 8) * 2.0**-24,
    )
    noise = np.asarray(gumbel_from_bits(jnp.asarray(high), jnp.asarray(low)))
    np.testing.assert_allclose(noise, -np.log(-np.log1p(-w)), rtol=2e-6, atol=2e-6)
    assert noise.max() > 44  # a default Gumbel ends at 15.94


def test_gumbel_noise_follows_its_law():
    """Kolmogorov's distance of 400,000 values, bound with failure probability 1e-6."""
    keys = position_keys(step_key(0, 1), jnp.arange(40), jnp.zeros(40, jnp.int32), Purpose.DRAFT)
    noise = np.sort(np.asarray(gumbel(keys, 10_000), np.float64).reshape(-1))
    law = np.exp(-np.exp(-noise))
    distance = np.abs(law - (np.arange(len(law)) + 0.5) / len(law)).max()
    bound = np.sqrt(np.log(2 / 1e-6) / 2 / len(law))
    assert distance < bound
    assert np.abs(np.exp(-np.exp(-1.02 * noise)) - law).max() > bound  # 2 % too wide is seen


def test_a_part_of_the_vocabulary_has_the_noise_of_the_whole():
    keys = position_keys(step_key(0, 1), jnp.arange(3), jnp.arange(3), Purpose.DRAFT)
    np.testing.assert_array_equal(gumbel(keys, 50), gumbel(keys, 200)[:, :50])
