"""The training step on each split of the same tokens, timed in turn."""

import time
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import numpy as np

from bench import measure, roofline
from bench.scenario import END, impose_lengths, random_weights
from bench.splits import COLUMNS, EMPTY, EPSILON, EVEN, EXTREME, UNEVEN, UpdateScenario
from saki_jax.models.config import Qwen3Config
from saki_jax.models.qwen3 import default_compute_dtype, language_model
from saki_jax.rollout.batch import Rollout
from saki_jax.rollout.engine import make_guided
from saki_jax.rollout.keys import step_key
from saki_jax.rollout.packing import pack, shape_for
from saki_jax.rollout.score import make_score
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.train.baselines import METHODS
from saki_jax.train.objective import Objective
from saki_jax.train.optimizer import make_optimizer
from saki_jax.train.state import init_state, make_rollout_copy
from saki_jax.train.update import make_update


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
        self.teacher_params = random_weights(scenario.teacher, 2)
        self.lengths = scenario.splits()
        self.rollouts = {name: scenario.rollout(n) for name, n in self.lengths.items()}
        self._make_rollout(dtype)
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def _make_rollout(self, dtype: Any) -> None:
        """Generation of the uneven batch under the bridge, and the teacher's scoring of it."""
        scenario = self.scenario
        spec = RolloutSpec(
            scenario.response_length,
            (END,),
            END,
            slots=scenario.slots,
            score_tokens=scenario.budget,
        )
        pair = [language_model(c, dtype) for c in (scenario.student, scenario.teacher)]
        self.prompts = self.rollouts[UNEVEN].prompts
        limited = [impose_lengths(model, self.prompts, self.lengths[UNEVEN]) for model in pair]
        self.generate = make_guided(*limited, spec)
        self.score = make_score(pair[1], spec)

    def run(self) -> dict[str, Any]:
        """Compiles, warms up, measures in turn, and derives."""
        tasks = {name: (lambda name=name: self._update(name)) for name in self.rollouts}
        tasks |= {"scoring": self._score, "weight sync": self._sync, "generation": self._generate}
        tasks["weight sync"]()
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
        self._timed("scoring", self.score, self.teacher_params, self.rollouts[UNEVEN])

    def _sync(self) -> None:
        self.weights = self._timed("weight sync", self.copy, self.state.params)

    def _generate(self) -> None:
        models = (self.weights, self.teacher_params)
        self._timed("generation", self.generate, *models, self.prompts, EPSILON, step_key(0, 1))

    def _rates(self) -> None:
        """What the hardware can do is the best that it was seen to do."""
        again = roofline.measure_rates(small=self.scenario.name == "tiny")
        self.rates = roofline.Rates(*map(max, self.rates, again))

    def _derive(self, programs: int) -> dict[str, Any]:
        splits = {name: self._of_split(name) for name in self.rollouts if name != EMPTY}
        return {
            "splits": splits,
            "over_even": {name: self._ratio(name, EVEN) for name in (UNEVEN, EXTREME)},
            "columns_over_packed": self._ratio(COLUMNS, UNEVEN),
            "step": self._step(),
            "seconds": {
                "update_without_passes": measure.middle(self.seconds[EMPTY]),
                "scoring": measure.middle(self.seconds["scoring"]),
            },
            "compiled_programs": programs,
        }

    def _step(self) -> dict[str, dict[str, float]]:
        """A whole step of the uneven batch as the paper splits it, seconds."""
        names = {"generation": "generation", "update": UNEVEN, "weight_sync": "weight sync"}
        parts = {part: self.seconds[name] for part, name in names.items()}
        whole = [sum(of_round) for of_round in zip(*parts.values(), strict=True)]
        return {part: measure.middle(found) for part, found in (parts | {"whole": whole}).items()}

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
