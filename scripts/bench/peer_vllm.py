"""Peer: vLLM's offline engine with continuous batching, for an environment of its own.

    python peer_vllm.py JOB.json       (started by bench_rollout.py; recipe in docs/benchmarks.md)

The student alone, float32, at most ``batch`` sequences at a time, sampled at temperature 1 from the
whole vocabulary; each request ends at its own length.
"""

import json
import os
import sys
import time
from pathlib import Path

# By default it keeps a core free for serving, half of a machine with two.
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
from vllm import LLM, SamplingParams


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    lengths = job["lengths"]
    longest = max(map(len, job["prompts"])) + max(lengths) + 1
    engine = LLM(
        model=job["student"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=job["batch"],
        max_model_len=longest,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.4,  # on a CPU a share of the host's memory, asked for at once
        enforce_eager=job["eager"],
        seed=0,
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in job["prompts"]]

    def run(lengths: list[int]) -> int:
        params = [
            SamplingParams(
                temperature=1.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False
            )
            for n in lengths
        ]
        answers = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    run([min(8, n) for n in lengths])
    print(json.dumps({"ready": ["vllm"]}), flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        tokens = run(lengths)
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "tokens": tokens, "steps": 0}), flush=True)


if __name__ == "__main__":
    main()
