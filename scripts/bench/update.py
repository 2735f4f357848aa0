"""The training step: the same tokens in rows of different length, timed in turn."""

import time
from collections import defaultdict
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import measure, roofline
from bench.scenario import END, random_weights
from saki_jax.models.config import Qwen3Config
from saki_jax.models.qwen3 import default_compute_dtype, language_model
from saki_jax.rollout.batch import Counters, Prompts, Rollout
from saki_jax.rollout.keys import step_key
from saki_jax.rollout.packing import pack, shape_for
from saki_jax.rollout.score import make_score
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.train.baselines import METHODS
from saki_jax.train.objective import Objective
from saki_jax.train.optimizer import make_optimizer
from saki_jax.train.state import init_state, make_rollout_copy
from saki_jax.train.update import make_update

EVEN, COLUMNS, EMPTY = "even", "all columns", "empty"
CORRECTED = 0.03  # share of the tokens that get the teacher's mode


@dataclass(frozen=True)
class UpdateScenario:
    """A preset.

    Attributes:
      name: of the preset.
      student, teacher: shapes; random weights.
      rows: responses, B.
      prompt_length: of every row, P.
      response_length: T.
      mean_length: of the responses; B times it is the number of tokens of every split.
      budget: tokens a micro-batch.
      chunk: positions whose logits exist together.
      remat: recompute layers in the backward pass.
      repeats: timed rounds.
    """

    name: str
    student: Qwen3Config
    teacher: Qwen3Config
    rows: int
    prompt_length: int
    response_length: int
    mean_length: int
    budget: int
    chunk: int = 512
    remat: bool = False
    repeats: int = 3

    def splits(self) -> dict[str, np.ndarray]:
        """Response lengths [B]. Three have the same sum; `all columns` fills every column, which
        is what a pass over unpacked rows costs, and `empty` makes no pass at all.
        """
        tokens = self.rows * self.mean_length
        spread = np.exp(1.2 * np.random.default_rng(0).normal(size=self.rows))
        longest, rest = divmod(tokens - self.rows, self.response_length - 1)
        row = np.arange(self.rows)
        extreme = np.where(
            row < longest, self.response_length, np.where(row == longest, 1 + rest, 1)
        )
        return {
            EVEN: np.full(self.rows, self.mean_length),
            "heavy-tailed": _with_sum(spread * self.mean_length, tokens, self.response_length),
            "extreme": extreme,
            COLUMNS: np.full(self.rows, self.response_length),
            EMPTY: np.zeros(self.rows, int),
        }

    def rollout(self, lengths: np.ndarray) -> Rollout:
        """A finished rollout of these lengths on random tokens."""
        rng = np.random.default_rng(1)
        shape = (self.rows, self.response_length)
        ids = lambda size: jnp.asarray(  # noqa: E731
            rng.integers(1, self.student.vocab_size, size), jnp.int32
        )
        near = lambda: jnp.asarray(  # noqa: E731
            -np.log(self.student.vocab_size) + 0.1 * rng.normal(size=shape), jnp.float32
        )
        nothing = jnp.zeros(shape, jnp.float32)
        rows = jnp.arange(self.rows, dtype=jnp.int32)
        return Rollout(
            prompts=Prompts(
                tokens=ids((self.rows, self.prompt_length)),
                length=jnp.full_like(rows, self.prompt_length),
                sequence_id=rows,
            ),
            tokens=ids(shape),
            length=jnp.asarray(lengths, jnp.int32),
            finished=jnp.ones(self.rows, bool),
            nonfinite=jnp.zeros(self.rows, bool),
            proposal=ids(shape),
            corrected=jnp.asarray(rng.random(shape) < CORRECTED),
            log_p=near(),
            log_t=near(),
            log_q=near(),
            **dict.fromkeys(("accept_prob", "beta", "kl", "tv", "entropy"), nothing),
            teacher_mode=ids(shape),
            teacher_sample=ids(shape),
            epsilon=jnp.float32(0.0),
            counters=Counters(*[jnp.int32(0)] * len(fields(Counters))),
        )


class Packed(NamedTuple):
    """How a batch lies in its lines."""

    passes: int
    slots: int  # of all passes
    tokens: int  # that a model reads
    responses: int  # of them, those that predict a response token


def packed(scenario: UpdateScenario, rollout: Rollout) -> Packed:
    """The packing that the update makes of this batch."""
    longest = scenario.prompt_length + scenario.response_length - 1
    shape = shape_for(scenario.rows, longest, scenario.budget)
    passes = int(pack(rollout.prompts, rollout.length, shape).passes)
    lengths = np.asarray(rollout.length)
    read = np.where(lengths > 0, scenario.prompt_length + lengths - 1, 0)
    return Packed(passes, passes * shape.lines * shape.width, int(read.sum()), int(lengths.sum()))


def training_flops(config: Qwen3Config, prompt_length: int, lengths: np.ndarray) -> float:
    """Operations of forward and backward (2 + 4 a weight and token), counted from shapes.

    The head counts at response tokens only, attention sees what is before a token in its own row.
    What is computed a second time (layers under remat, logits) is not counted: it is no progress.
    """
    lengths = lengths[lengths > 0].astype(float)
    read = prompt_length + lengths - 1
    head = config.vocab_size * config.hidden_size
    layers = roofline.matrix_size(config) - head
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * (read**2 / 2).sum()
    return 3 * (2 * layers * read.sum() + 2 * head * lengths.sum() + attention)


class UpdateContest:
    """The update on every split, teacher scoring on the uneven one, the copy for the rollout."""

    def __init__(self, scenario: UpdateScenario, rates: roofline.Rates):
        self.scenario, self.rates = scenario, rates
        dtype = default_compute_dtype()
        student = language_model(scenario.student, dtype, remat=scenario.remat)
        optimizer = make_optimizer(learning_rate=1e-6)
        self.update = make_update(
            student,
            METHODS["saki"],
            Objective(),
            optimizer,
            tokens_per_micro_batch=scenario.budget,
            chunk=scenario.chunk,
            compute_dtype=dtype,
        )
        self.state = init_state(random_weights(scenario.student, 1), optimizer)
        self.copy = make_rollout_copy(dtype)
        spec = RolloutSpec(scenario.response_length, (END,), END, score_tokens=scenario.budget)
        self.score = make_score(language_model(scenario.teacher, dtype), spec)
        self.teacher_params = random_weights(scenario.teacher, 2)
        self.lengths = scenario.splits()
        self.rollouts = {name: scenario.rollout(n) for name, n in self.lengths.items()}
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def run(self) -> dict[str, Any]:
        """Compiles, warms up, measures in turn, and derives."""
        tasks = {name: (lambda name=name: self._update(name)) for name in self.rollouts}
        tasks |= {"scoring": self._score, "weight sync": self._sync}
        for task in tasks.values():
            task()
        programs = self.update._cache_size()
        self.seconds.clear()
        measure.interleave(tasks | {"rates": self._rates}, self.scenario.repeats)
        return self._derive(programs)

    def _timed(self, name: str, function: Any, *arguments: Any) -> Any:
        began = time.perf_counter()
        result = jax.block_until_ready(function(*arguments))
        self.seconds[name].append(time.perf_counter() - began)
        return result

    def _update(self, name: str) -> None:
        self.state, _ = self._timed(
            name, self.update, self.state, self.rollouts[name], step_key(0, 1)
        )

    def _score(self) -> None:
        self._timed("scoring", self.score, self.teacher_params, self.rollouts["heavy-tailed"])

    def _sync(self) -> None:
        self._timed("weight sync", self.copy, self.state.params)

    def _rates(self) -> None:
        """What the hardware can do is the best that it was seen to do."""
        again = roofline.measure_rates(small=self.scenario.name == "tiny")
        self.rates = roofline.Rates(*map(max, self.rates, again))

    def _derive(self, programs: int) -> dict[str, Any]:
        splits = {name: self._of_split(name) for name in self.rollouts if name != EMPTY}
        return {
            "splits": splits,
            "over_even": {name: self._ratio(name, EVEN) for name in ("heavy-tailed", "extreme")},
            "columns_over_packed": self._ratio(COLUMNS, "heavy-tailed"),
            "seconds": {
                "update_without_passes": measure.middle(self.seconds[EMPTY]),
                "scoring": measure.middle(self.seconds["scoring"]),
                "weight_sync": measure.middle(self.seconds["weight sync"]),
            },
            "compiled_programs": programs,
        }

    def _of_split(self, name: str) -> dict[str, Any]:
        scenario, seconds = self.scenario, self.seconds[name]
        lies = packed(scenario, self.rollouts[name])
        flops = training_flops(scenario.student, scenario.prompt_length, self.lengths[name])
        speed = measure.middle([flops / s for s in seconds])
        return lies._asdict() | {
            "longest": int(self.lengths[name].max()),
            "shortest": int(self.lengths[name].min()),
            "filled": lies.tokens / lies.slots,
            "seconds": measure.middle(seconds),
            "tokens_per_second": measure.middle([lies.responses / s for s in seconds]),
            "flops": flops,
            "flops_per_second": speed,
            "share_of_matmul": speed["median"] / self.rates.matmul,
        }

    def _ratio(self, name: str, other: str) -> dict[str, float]:
        """Formed in each round, between neighbours in time."""
        pairs = zip(self.seconds[name], self.seconds[other], strict=True)
        return measure.middle([mine / theirs for mine, theirs in pairs])


def _with_sum(lengths: np.ndarray, total: int, most: int) -> np.ndarray:
    """Whole numbers from 1 to `most`, in proportion to `lengths`, that add up to `total`."""
    low, high = 0.0, total / lengths.min()
    for _ in range(100):
        scale = (low + high) / 2
        rounded = np.clip(np.round(scale * lengths), 1, most).astype(int)
        low, high = (scale, high) if rounded.sum() <= total else (low, scale)
    rounded = np.clip(np.round(low * lengths), 1, most).astype(int)
    for row in np.argsort(lengths):  # what rounding left over goes to the shortest
        rounded[row] += min(total - rounded.sum(), most - rounded[row])
    return rounded
