"""What is generated in a benchmark: the pair of models, the prompts, and how long each answer is.

Models with random weights do not end their answers, so the lengths are imposed, and on everybody
alike: the first token of a prompt is the number of its row, and at the position where that row has
to end both models put all their mass on the end token (before it, none). Student, engine, external
loop and their teachers then answer every row with exactly the same number of tokens.
"""

import dataclasses
import re
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from saki_jax.models import hf
from saki_jax.models.config import Qwen3Config
from saki_jax.models.lm import LanguageModel
from saki_jax.models.qwen3 import default_compute_dtype, init_params, language_model
from saki_jax.models.segments import segment_starts
from saki_jax.rollout.batch import Prompts
from saki_jax.rollout.spec import RolloutSpec

END = 0  # the end token of every benchmark
_CERTAIN = 1e4  # a logit that leaves the others no mass, and, negative, none to its own token
_LOGIT_SPREAD = 2.0  # standard deviation of a random model's logits, as peaked as a real one's

STUDENT_ONLY, ADAPTIVE, EXTERNAL, TOKEN_WISE = (
    "student_only", "exact_q_adaptive", "external_k8", "token_wise",
)  # fmt: skip
# Behind a name: the last rows are gathered into fewer slots; the caches are made for T tokens.
OPTIONS = re.compile(r"(?P<compact>_compact)?(_t(?P<length>\d+))?$")


def without_teacher(name: str) -> bool:
    """Whether the contender of that name knows no teacher."""
    return OPTIONS.sub("", name) == STUDENT_ONLY


@dataclass(frozen=True)
class Scenario:
    """A preset.

    Attributes:
      name: of the preset.
      student, teacher: shapes of the pair; random weights unless folders are given.
      batches: rows generated at the same time (slots), one table each.
      rows: responses, for each of the batches; more than slots, so that slots are refilled.
      prompt_length: longest prompt; the shortest has half of it.
      response_length: T. No response is longer; the caches are made for it.
      median_length: of the responses.
      spread: sigma of the log-normal lengths; 0 = all equal.
      contenders: what is run, in the names of contenders.py.
      repeats: timed runs of each contender, interleaved.
      correction_rate: what epsilon is tuned for.
      seconds_each: a contender other than student and engine is stopped after so long, and judged
        by what it committed until then (in its favour: it has no tail of few rows).
      prefill_buckets: widths of the compiled prefills; each is one more forward to compile.
      compact: fewest slots into which the last rows are gathered, 0 = never; each gathering is one
        more program to compile.
    """

    name: str
    student: Qwen3Config
    teacher: Qwen3Config
    batches: tuple[int, ...]
    rows: tuple[int, ...]
    prompt_length: int
    response_length: int
    median_length: int
    spread: float
    contenders: tuple[str, ...]
    repeats: int
    correction_rate: float = 0.03
    seconds_each: float = float("inf")
    prefill_buckets: int = 3
    compact: int = 8

    @property
    def guided(self) -> bool:
        """Whether any contender uses the teacher."""
        return not all(map(without_teacher, self.contenders))

    def spec(self, batch: int, block_size: int = 8) -> RolloutSpec:
        """The rollout asked for at a batch size."""
        return RolloutSpec(
            response_length=self.response_length,
            end_ids=(END,),
            pad_id=END,
            block_size=block_size,
            slots=batch,
            prefill_buckets=self.prefill_buckets,
            compact=self.compact,
        )

    def lengths(self, rows: int) -> np.ndarray:
        """Response lengths [B]: evenly spaced quantiles of the log-normal law, shuffled."""
        normal = NormalDist()
        z = np.array([normal.inv_cdf((i + 0.5) / rows) for i in range(rows)])
        lengths = np.round(self.median_length * np.exp(self.spread * z)).astype(np.int32)
        lengths = np.clip(lengths, 1, self.response_length)
        return np.random.default_rng(0).permutation(lengths)

    def prompts(self, rows: int) -> Prompts:
        """Random prompts of the longest length and down to half of it."""
        rng = np.random.default_rng(1)
        length = rng.integers(max(self.prompt_length // 2, 1), self.prompt_length + 1, rows)
        tokens = rng.integers(1, self.student.vocab_size, (rows, self.prompt_length))
        tokens[:, 0] = np.arange(rows)
        ids = np.arange(rows, dtype=np.int32)
        return Prompts(tokens.astype(np.int32), length.astype(np.int32), ids)


class Pair(NamedTuple):
    """Two models and their weights."""

    student: LanguageModel
    teacher: LanguageModel
    student_params: Any
    teacher_params: Any


def load_pair(
    scenario: Scenario, student: str | None = None, teacher: str | None = None
) -> tuple[Scenario, Pair]:
    """The pair of the scenario, or of the folders given; and the scenario with its configurations.

    Raises:
      ValueError: a folder for one model only, where contenders use both.
    """
    if (student is None) != (teacher is None):
        if student is None or scenario.guided:
            raise ValueError(
                "give folders for both student and teacher: a checkpoint and random weights share "
                f"no vocabulary. (A student alone will do for --contenders {STUDENT_ONLY})"
            )
        teacher = student  # only its shapes are used, by the phases
    loaded = {}
    for role, folder, seed in (("student", student, 1), ("teacher", teacher, 2)):
        if folder is None:
            config = getattr(scenario, role)
            loaded[role] = (config, random_weights(config, seed))
        else:
            loaded[role] = hf.load(folder, dtype=default_compute_dtype())
    configs = {role: config for role, (config, _) in loaded.items()}
    scenario = dataclasses.replace(scenario, **configs)
    models = (language_model(configs[role]) for role in ("student", "teacher"))
    return scenario, Pair(*models, loaded["student"][1], loaded["teacher"][1])


def random_weights(config: Qwen3Config, seed: int) -> Any:
    """Random weights in the compute dtype whose logits spread like those of a trained model."""
    dtype = default_compute_dtype()

    @jax.jit
    def make(key):
        params = init_params(config, key)
        scale = _LOGIT_SPREAD / (config.initializer_range * config.hidden_size**0.5)
        params["norm"]["scale"] = params["norm"]["scale"] * scale
        return jax.tree.map(lambda x: x.astype(dtype), params)

    return make(jax.random.key(seed))


def impose_lengths(model: LanguageModel, prompts: Prompts, lengths: np.ndarray) -> LanguageModel:
    """The model with the end of each answer fixed by the first token of its prompt.

    The token is remembered in one more leaf of the cache, [B, 1]; whether the next token has to be
    the end travels as one more column of the hidden states.
    """
    # Position of the token that is followed by the end.
    last = jnp.asarray(np.asarray(prompts.length) - 1 + lengths - 1, jnp.int32)

    def init_cache(rows: int, slots: int):
        return model.init_cache(rows, slots), jnp.zeros((rows, 1), jnp.int32)

    def forward(params, tokens, start, cache, segment_ids=None):
        position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        if cache is None:
            hidden, _ = model.forward(params, tokens, start, None, segment_ids)
            first = jnp.zeros_like(tokens) if segment_ids is None else segment_starts(segment_ids)
            row, whole = jnp.take_along_axis(tokens, first, axis=1), None
            position = position - first
        else:
            hidden, inner = model.forward(params, tokens, start, cache[0])
            row = jnp.where(start[:, None] == 0, tokens[:, :1], cache[1])
            whole = (inner, row)
            position = start[:, None] + position
        ends = position >= last.at[row].get(mode="clip")
        return jnp.concatenate([hidden, ends[:, :, None].astype(hidden.dtype)], axis=-1), whole

    def logits(params, hidden):
        plain = model.logits(params, hidden[..., :-1])
        return plain.at[..., END].set(jnp.where(hidden[..., -1] > 0, _CERTAIN, -_CERTAIN))

    return dataclasses.replace(model, init_cache=init_cache, forward=forward, logits=logits)
