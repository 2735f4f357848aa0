"""``python -m saki_jax.export RUN OUT [--step N] [--dtype bfloat16]``: a run's student as a folder.

RUN is the folder of a training run (or one of its ``checkpoints/STEP``); OUT becomes a Hugging Face
folder, with config, weights and the tokenizer of the initial student, that transformers, vLLM and
``--config.student=OUT`` load. The float32 masters are read; moments and counters stay behind.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from saki_jax.evals import checkpoint
from saki_jax.models import hf
from saki_jax.models.tokenizer import TokenizerError

DTYPES = ("bfloat16", "float16", "float32")


def export(run: str | Path, out: str | Path, *, step: int = 0, dtype: str = "bfloat16") -> Path:
    """Writes the student of a run's checkpoint as a Hugging Face folder and returns it.

    Args:
      run: the run's folder, or one of its checkpoints.
      out: the folder to make; it must not exist, or be empty.
      step: which checkpoint, 0 = the newest complete one.
      dtype: of the weights written. float32 loses nothing; the others round once.

    Raises:
      SubjectError: there is no such run or step, or it is a Hugging Face folder already.
      FileExistsError: ``out`` holds something; nothing is overwritten.
    """
    source = checkpoint.find(run, step=step)
    if source.step_folder is None:
        raise checkpoint.SubjectError(f"{run} is a Hugging Face folder already; copy it instead")
    subject = checkpoint.load(source, dtype=jnp.float32)
    return hf.save(
        out, subject.config, subject.params, dtype=jnp.dtype(dtype), tokenizer_from=source.folder
    )


def main(arguments: Sequence[str]) -> None:
    """Reads the command line, exports, and says what was written."""
    parser = argparse.ArgumentParser(prog="python -m saki_jax.export", description=__doc__)
    parser.add_argument("run", help="folder of a training run")
    parser.add_argument("out", help="Hugging Face folder to make")
    parser.add_argument("--step", type=int, default=0, help="checkpoint; the newest if not given")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights")
    given = parser.parse_args(arguments)
    try:
        path = export(given.run, given.out, step=given.step, dtype=given.dtype)
    except (checkpoint.SubjectError, hf.CheckpointError, TokenizerError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
