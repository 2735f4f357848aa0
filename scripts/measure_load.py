"""Host memory of loading a checkpoint of real shape with random weights.

    python scripts/measure_load.py --preset 1.7b --dtype bfloat16 --dir /some/where/with/4/GB

writes the checkpoint tensor by tensor in bfloat16 (and removes it again), loads it in a fresh
process, and prints the peak resident memory above what the process had before, beside the bytes
kept as parameters and the largest tensor.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from saki_jax.models import hf, safetensors_file
from saki_jax.models.config import PRESETS, Qwen3Config
from saki_jax.models.parameters import describe

MIB = 1 << 20


def write_random(folder: Path, config: Qwen3Config) -> None:
    """A checkpoint of this shape; never more than one tensor in memory."""
    rng = np.random.default_rng(0)
    shapes = {p.hf_name: p.hf_shape for p in describe(config)}
    arrays = (
        (name, (0.02 * rng.standard_normal(shape, np.float32)).astype(ml_dtypes.bfloat16))
        for name, shape in shapes.items()
    )
    bf16 = np.dtype(ml_dtypes.bfloat16)
    safetensors_file.write(folder / "model.safetensors", shapes, bf16, arrays)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))


def resident(which: str) -> float:
    """Resident memory of this process, MiB: now (VmRSS) or at its peak (VmHWM). Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1024


def load_and_report(folder: Path, dtype: str) -> None:
    """Loads in this process and prints the figures."""
    jax.block_until_ready(jax.numpy.zeros(8))  # the backend is up before we count
    before, start = resident("VmRSS"), time.perf_counter()
    config, params = hf.load(folder, dtype=dtype)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - start
    peak = resident("VmHWM") - before
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / MIB
    width = np.dtype(dtype).itemsize
    largest = max(int(np.prod(p.shape)) for p in describe(config)) * width / MIB
    print(
        f"{dtype}: {seconds:.1f} s; kept {kept:.0f} MiB, peak {peak:.0f} MiB above the start, "
        f"that is {peak - kept:.0f} MiB above what is kept; largest tensor {largest:.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="1.7b")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--dir", type=Path, default=None, help="where to put it (temporary)")
    parser.add_argument("--load", type=Path, default=None, help="only load this folder")
    args = parser.parse_args()
    if args.load is not None:
        load_and_report(args.load, args.dtype)
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        write_random(Path(name), PRESETS[args.preset])
        command = [sys.executable, __file__, "--load", name, "--dtype", args.dtype]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
