"""What the hardware allows: bytes and operations counted from shapes, over measured rates.

The compiler's cost analysis counts the body of a loop once, so it is not used. Random numbers cost
integer operations that appear in neither rate; they are left out, which makes the bound too good.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from saki_jax.models.cache import cache_dtype
from saki_jax.models.config import Qwen3Config
from saki_jax.models.parameters import describe
from saki_jax.models.qwen3 import default_compute_dtype


class Rates(NamedTuple):
    """Measured on this machine: bytes/s of a copy (read and written) and of reading a matrix for a
    product with a vector, operations/s of a product of matrices."""

    copy: float
    read: float
    matmul: float

    @property
    def memory(self) -> float:
        """Bytes/s at best. Decoding mostly reads, which a CPU does faster than it copies."""
        return max(self.copy, self.read)


class Work(NamedTuple):
    """Bytes to move and floating-point operations to do."""

    bytes: float
    flops: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def __mul__(self, times: float) -> "Work":
        return Work(self.bytes * times, self.flops * times)

    def seconds(self, rates: Rates) -> float:
        """The longer of moving and computing, as if they overlapped perfectly."""
        return max(self.bytes / rates.memory, self.flops / rates.matmul)


def measure_rates(small: bool = False) -> Rates:
    """Best of several: copies an array, multiplies it with a vector, and two matrices in the
    compute dtype."""
    copy_bytes, size = (2**28, 2048)
    if small:
        copy_bytes, size = (2**24, 256)
    elif jax.default_backend() != "cpu":  # long beside the time that a launch takes
        copy_bytes, size = (2**31, 8192)
    dtype = default_compute_dtype()
    x = jnp.ones(copy_bytes // 4, jnp.float32)
    matrix = jnp.ones((copy_bytes // dtype.itemsize // 4096, 4096), dtype)
    a = jnp.ones((size, size), dtype)
    return Rates(
        copy=2 * x.nbytes / best_time(_copy, x),
        read=matrix.nbytes / best_time(_product, matrix, matrix[0]),
        matmul=2 * size**3 / best_time(_product, a, a),
    )


@jax.jit
def _copy(x: jax.Array) -> jax.Array:
    return x + 1.0


@jax.jit
def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b


def best_time(function: Callable, *arguments, repeats: int = 5) -> float:
    """The shortest of some runs after a first one."""
    return min(times(function, *arguments, repeats=repeats))


def median_time(function: Callable, *arguments, repeats: int = 5) -> float:
    """The median of some runs after a first one."""
    return statistics.median(times(function, *arguments, repeats=repeats))


def times(function: Callable, *arguments, repeats: int) -> list[float]:
    """Seconds of each run after a first one."""
    jax.block_until_ready(function(*arguments))
    result = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        result.append(time.perf_counter() - began)
    return result


def matrix_size(config: Qwen3Config) -> int:
    """Weights that every token is multiplied with: all matrices, the head counted once."""
    matrices = [p for p in describe(config) if len(p.shape) == 2]
    total = sum(p.shape[0] * p.shape[1] for p in matrices)
    table = config.vocab_size * config.hidden_size
    # An untied embedding is looked up, not multiplied.
    return total if config.tie_word_embeddings else total - table


def forward(config: Qwen3Config, rows: int, tokens: int, context: float) -> Work:
    """One forward of ``tokens`` new tokens a row over ``context`` cached ones, with its logits."""
    weight_bytes = default_compute_dtype().itemsize
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    kv_bytes *= cache_dtype(default_compute_dtype()).itemsize
    logits = 4 * rows * tokens * config.vocab_size
    moved = matrix_size(config) * weight_bytes + rows * (context + tokens) * kv_bytes + logits
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * context
    return Work(moved, rows * tokens * (2 * matrix_size(config) + attention))


def bridge(vocab_size: int, positions: int, readings: float) -> Work:
    """Both logits read ``readings`` times; its arithmetic hides behind the reading."""
    return Work(2 * 4 * positions * vocab_size * readings, 0.0)


def draws(vocab_size: int, positions: int) -> Work:
    """The logits read once to draw from them."""
    return Work(4 * positions * vocab_size, 0.0)


def student_step(student: Qwen3Config, rows: int, context: float) -> Work:
    """A decode step of the student alone."""
    return forward(student, rows, 1, context) + draws(student.vocab_size, rows)


def wave(
    student: Qwen3Config,
    teacher: Qwen3Config,
    rows: int,
    block_size: int,
    context: float,
    readings: float,
) -> Work:
    """A guided wave: K student steps, a teacher forward over K tokens, the bridge on them."""
    return (
        student_step(student, rows, context) * block_size
        + forward(teacher, rows, block_size, context)
        + bridge(student.vocab_size, rows * block_size, readings)
    )


def bound(
    student: Qwen3Config,
    teacher: Qwen3Config,
    rows: int,
    block_size: int,
    context: float,
    readings: float,
    rates: Rates,
) -> dict[str, float]:
    """Seconds of a student step and of a wave at the roofline, part by part, and their traffic."""
    step = student_step(student, rows, context)
    parts = {
        "draft": step * block_size,
        "verify": forward(teacher, rows, block_size, context),
        "bridge": bridge(student.vocab_size, rows * block_size, readings),
    }
    whole = wave(student, teacher, rows, block_size, context, readings)
    return {
        "student_step_seconds": step.seconds(rates),
        "wave_seconds": sum(work.seconds(rates) for work in parts.values()),
        "wave_gigabytes": whole.bytes / 1e9,
        "wave_gigaflops": whole.flops / 1e9,
        **{f"{name}_seconds": work.seconds(rates) for name, work in parts.items()},
    }


def shape_of(config: Qwen3Config) -> dict[str, float]:
    """What a reader wants to know of a model: its size, and the head's share of the work."""
    size = matrix_size(config)
    return {
        "parameters": size,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "head_share": config.vocab_size * config.hidden_size / size,
    }
