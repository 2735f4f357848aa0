"""Random numbers and decisions: the same bits on the device as on a CPU.

Keys, uniforms and raw bits are integers and must be equal. Gumbel noise goes through two logarithms
and acceptance through an exponential, in which devices differ by ulps; a token or a decision may
then differ only where it hangs on such a difference. How many do is said beside each figure.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from accelerator.findings import Check, Finding, Setting
from saki_jax.rollout import coupling
from saki_jax.rollout.keys import Purpose, gumbel, position_keys, step_key, uniform

# An error d of the noise changes the odds of a token by a factor of at most exp(2 d).
NOISE = 1e-5
# Of a uniform number with 24 bits: what expm1 may lose on a number below 1.
DECISION = 1e-6
_ROWS = 64
_DECISIONS = 100_000


def checks(setting: Setting) -> dict[str, Check]:
    """By name; every one compares the device with the CPU."""
    return {
        "keys: words that differ": partial(_integers, setting, _key_words),
        "uniforms: numbers that differ": partial(_integers, setting, _uniforms),
        "Gumbel noise: largest difference": partial(_noise, setting),
        "acceptance: distance from the threshold where decisions differ": partial(
            _decisions, setting
        ),
        "draws: gap between the two best where tokens differ": partial(_draws, setting),
    }


def on(device: jax.Device, function, *arguments) -> np.ndarray:
    """The function compiled for a device, on these host arrays."""
    with jax.default_device(device):
        return jax.device_get(jax.jit(function)(*jax.device_put(arguments, device)))


def _both(setting: Setting, function, *arguments) -> tuple[np.ndarray, np.ndarray]:
    return tuple(on(d, function, *arguments) for d in (setting.device, setting.reference))


def _positions(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequence ids up to the largest, and positions."""
    ids = np.linspace(0, 2**31 - 1, rows).astype(np.int32)
    return ids, np.arange(rows, dtype=np.int32) % 4096


def _keys(ids: jax.Array, position: jax.Array, purpose: Purpose) -> jax.Array:
    return position_keys(step_key(3, 7), ids, position, purpose)


def _key_words(ids, position):
    return jnp.stack([jax.random.key_data(_keys(ids, position, p)) for p in Purpose])


def _uniforms(ids, position):
    return uniform(_keys(ids, position, Purpose.ACCEPT))


def _integers(setting: Setting, function) -> Finding:
    ours, theirs = _both(setting, function, *_positions(_DECISIONS))
    return Finding(float((ours != theirs).sum()), 0, f"of {ours.size}")


def _noise(setting: Setting) -> Finding:
    def noise(ids, position):
        return gumbel(_keys(ids, position, Purpose.DRAFT), setting.wide_vocab)

    ours, theirs = _both(setting, noise, *_positions(_ROWS))
    unequal = (ours != theirs).mean()
    note = f"{unequal:.2%} differ in some bit; largest number {theirs.max():.1f}"
    return Finding(float(np.abs(ours - theirs).max()), NOISE, note)


def _decisions(setting: Setting) -> Finding:
    """Log-ratios from nearly 0 to -30, half of the uniforms within an ulp or so of 1 - q/p."""
    rng = np.random.default_rng(0)
    x = -np.exp(rng.uniform(np.log(1e-7), np.log(30), _DECISIONS)).astype(np.float32)
    threshold = -np.expm1(x.astype(np.float64))
    near = threshold + rng.integers(-2, 3, _DECISIONS) * 2.0**-24
    v = np.where(rng.random(_DECISIONS) < 0.5, near, rng.random(_DECISIONS))
    v = np.clip(v, 0, 1 - 2.0**-24).astype(np.float32)
    ours, theirs = _both(setting, coupling.rejects, v, x)
    differ = ours != theirs
    gap = np.abs(v - threshold)[differ].max(initial=0.0)
    return Finding(float(gap), DECISION, f"{differ.sum()} of {differ.size} differ")


def _draws(setting: Setting) -> Finding:
    """From equal logits. The gap is measured with the CPU's noise."""
    logits = np.random.default_rng(1).normal(0, 2, (_ROWS, setting.wide_vocab))
    logits = logits.astype(np.float32)

    def drawn(logits, ids, position):
        return coupling.draw(logits, _keys(ids, position, Purpose.DRAFT))

    def noisy(logits, ids, position):
        return logits + gumbel(_keys(ids, position, Purpose.DRAFT), logits.shape[1])

    where = _positions(_ROWS)
    ours, theirs = _both(setting, drawn, logits, *where)
    score = on(setting.reference, noisy, logits, *where)
    gap = score.max(axis=1) - score[np.arange(_ROWS), ours]
    return Finding(float(gap.max()), 2 * NOISE, f"{(ours != theirs).sum()} of {_ROWS} differ")
