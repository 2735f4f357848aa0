"""Peer: transformers' torch ``generate()``, and its assisted generation at batch 1.

    python peer_transformers.py JOB.json       (started by bench_rollout.py, extra `parity`)

Groups of ``batch`` prompts in the order given, left-padded, sampled at temperature 1 from the whole
vocabulary, float32. transformers refills nothing: a group takes as long as its longest answer.
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria


class PerRow(StoppingCriteria):
    """Stops each row at its own length."""

    def __init__(self, prompt_width: int, lengths: list[int]):
        self.total = prompt_width + torch.tensor(lengths)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.total


def load(folder: str):
    """A float32 model whose own generation settings are put aside."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=None
    )
    return model


@torch.inference_mode()
def generate(model, prompts: list[list[int]], lengths: list[int], **options) -> int:
    """Answers one group; returns the decode steps taken."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    result = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max(lengths),
        stopping_criteria=[PerRow(width, lengths)],
        **options,
    )
    steps = result.shape[1] - width
    if steps < max(lengths):
        raise RuntimeError(f"transformers stopped after {steps} of {max(lengths)} tokens")
    return steps


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    prompts, lengths, batch = job["prompts"], job["lengths"], job["batch"]
    contenders = {"transformers": (load(job["student"]), {})}
    if batch == 1 and "teacher" in job:
        # It draws from the teacher's law, not from q; the pair and the drafts are the same.
        assistant = {"assistant_model": contenders["transformers"][0]}
        contenders["transformers_assisted"] = (load(job["teacher"]), assistant)

    def run(name: str) -> int:
        model, options = contenders[name]
        groups = range(0, len(prompts), batch)
        return sum(
            generate(model, prompts[i : i + batch], lengths[i : i + batch], **options)
            for i in groups
        )

    for name, (model, options) in contenders.items():
        del name
        generate(model, prompts[:batch], [min(8, n) for n in lengths[:batch]], **options)
    print(json.dumps({"ready": list(contenders)}), flush=True)
    for line in sys.stdin:
        torch.manual_seed(0)
        began = time.perf_counter()
        steps = run(line.strip())
        seconds = time.perf_counter() - began
        answer = {"seconds": seconds, "tokens": sum(lengths), "steps": steps}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
