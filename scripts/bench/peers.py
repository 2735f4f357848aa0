"""Other generators in processes of their own, driven by one line each so that runs interleave.

A peer gets a job (JSON): folders of the same weights, prompts and lengths. It loads, warms up, says
``{"ready": [contenders]}``, and then answers each line ``name`` with ``{"seconds", "tokens"}``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from bench.measure import Sample
from bench.scenario import Pair, Scenario
from saki_jax.models import hf
from saki_jax.rollout.batch import Prompts

CHILDREN = {"transformers": "peer_transformers.py", "vllm": "peer_vllm.py"}


def export(folder: Path, scenario: Scenario, pair: Pair) -> dict[str, str]:
    """Writes what the contenders use of the pair as float32 checkpoints; {role: folder}."""
    roles = ("student", "teacher") if scenario.guided else ("student",)
    for role in roles:
        config, params = getattr(scenario, role), getattr(pair, f"{role}_params")
        hf.save(folder / role, config, params, dtype=jnp.float32)
    return {role: str(folder / role) for role in roles}


def job(
    models: dict[str, str], prompts: Prompts, lengths: np.ndarray, batch: int, eager: bool = False
) -> dict[str, Any]:
    """What a peer is told; ``eager``: it need not compile anything."""
    rows = zip(prompts.tokens.tolist(), prompts.length.tolist(), strict=True)
    return {
        **models,
        "prompts": [tokens[:length] for tokens, length in rows],
        "lengths": lengths.tolist(),
        "batch": batch,
        "threads": os.cpu_count(),
        "eager": eager,
    }


class Peer:
    """A running peer.

    Args:
      kind: "transformers" or "vllm".
      python: interpreter of the environment that has it.
      work: its job.
      folder: where the job is written.
    """

    def __init__(self, kind: str, python: str, work: dict[str, Any], folder: Path):
        path = folder / f"{kind}_{work['batch']}.json"
        path.write_text(json.dumps(work))
        script = Path(__file__).parent / CHILDREN[kind]
        self._kind = kind
        self._process = subprocess.Popen(
            [python, str(script), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
        )
        self.contenders: list[str] = self._answer()["ready"]

    def run(self, name: str) -> Sample:
        """One timed run of one of its contenders."""
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return Sample(answer["seconds"], answer["tokens"], answer["steps"], 0, 0, True)

    def close(self) -> None:
        """Lets it end."""
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
            sys.stderr.write(line)  # a library's own words
        raise RuntimeError(
            f"the {self._kind} process ended with code {self._process.wait()}; its own words stand "
            "above. Is it installed in the environment whose Python was given?"
        )
