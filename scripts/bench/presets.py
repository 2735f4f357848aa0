"""The scenarios of bench_rollout.py by name."""

from bench.scenario import ADAPTIVE, EXTERNAL, STUDENT_ONLY, TOKEN_WISE, Scenario
from saki_jax.models.config import PRESETS as MODELS
from saki_jax.models.config import Qwen3Config


def _qwen3(layers, hidden, feed_forward, heads, groups, head_dim, vocab) -> Qwen3Config:
    return Qwen3Config(vocab, hidden, feed_forward, layers, heads, groups, head_dim)


_ENGINE = ("engine_k1", "engine_k4", "engine_k8")

PRESETS = {
    # Seconds; shows that everything runs. Its figures mean nothing.
    "tiny": Scenario(
        name="tiny",
        student=_qwen3(1, 16, 32, 2, 1, 8, 64),
        teacher=_qwen3(2, 16, 32, 2, 1, 8, 64),
        batches=(2,),
        rows=(5,),
        prompt_length=6,
        response_length=24,
        median_length=10,
        spread=0.6,
        contenders=(STUDENT_ONLY, "engine_k8", EXTERNAL, TOKEN_WISE),
        repeats=2,
        correction_rate=0.1,
    ),
    # 11.5M and 26.3M parameters: a step costs like 1.7B to 4B, and the head has their share of the
    # weights (18 % and 10 %).
    "cpu": Scenario(
        name="cpu",
        student=_qwen3(12, 256, 768, 4, 2, 64, 8192),
        teacher=_qwen3(15, 320, 1216, 8, 2, 64, 8192),
        batches=(1, 8),
        rows=(8, 32),
        prompt_length=32,
        response_length=768,
        median_length=80,
        spread=1.0,
        contenders=(STUDENT_ONLY, *_ENGINE, ADAPTIVE, EXTERNAL, TOKEN_WISE),
        repeats=5,
    ),
    # Small models under the real vocabulary: draws and bridge are nearly all of it on a CPU.
    "vocab": Scenario(
        name="vocab",
        student=_qwen3(2, 64, 128, 2, 1, 32, 151936),
        teacher=_qwen3(3, 64, 192, 2, 1, 32, 151936),
        batches=(8,),
        rows=(8,),
        prompt_length=8,
        response_length=48,
        median_length=24,
        spread=0.3,
        contenders=(STUDENT_ONLY, "engine_k8", EXTERNAL),
        repeats=3,
    ),
    # The paper's pair with random weights, for one accelerator: about ten minutes.
    "h200": Scenario(
        name="h200",
        student=MODELS["1.7b"],
        teacher=MODELS["4b"],
        batches=(64,),
        rows=(128,),
        prompt_length=128,
        response_length=2048,
        median_length=300,
        spread=0.9,
        contenders=(STUDENT_ONLY, "engine_k8", EXTERNAL),  # compiling takes half of the time
        repeats=2,
        seconds_each=15.0,
        prefill_buckets=1,  # of eight prompts one nearly always needs the widest
        compact=0,
    ),
}
