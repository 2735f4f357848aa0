"""All contenders at one batch size: calibrated, warmed up, run in turn, and judged."""

from collections import defaultdict
from typing import Any

import numpy as np

from bench import measure, memory, peers, phases, report, roofline
from bench.contenders import build
from bench.scenario import (
    ADAPTIVE,
    OPTIONS,
    STUDENT_ONLY,
    TOKEN_WISE,
    Pair,
    Scenario,
    impose_lengths,
    without_teacher,
)
from bench.snapshots import snapshots
from saki_jax.rollout.batch import Rollout
from saki_jax.rollout.keys import step_key

BLOCK = 8  # of the engine that stands for exact-q
MOMENTS = 4  # of the rollout, at which the phases are timed


class Contest:
    """All contenders at one batch size."""

    def __init__(
        self, scenario: Scenario, pair: Pair, batch: int, rows: int, rates: roofline.Rates
    ):
        self.scenario, self.pair = scenario, pair
        self.batch, self.rows, self.rates = batch, rows, rates
        self.prompts, self.lengths = scenario.prompts(rows), scenario.lengths(rows)
        self.key = step_key(0, 1)
        limited = pair._replace(
            student=impose_lengths(pair.student, self.prompts, self.lengths),
            teacher=impose_lengths(pair.teacher, self.prompts, self.lengths),
        )
        self.contenders = {
            name: build(name, limited, lambda size: scenario.spec(batch, size))
            for name in scenario.contenders
        }
        self.peers: dict[str, peers.Peer] = {}
        self.samples: dict[str, list[measure.Sample]] = defaultdict(list)
        self.phases: dict[str, list[float]] = defaultdict(list)

    def add_peer(self, peer: peers.Peer) -> None:
        """Takes another process's contenders in."""
        self.peers |= dict.fromkeys(peer.contenders, peer)

    def run(self, epsilon: float | None) -> dict[str, Any]:
        """Calibrates, warms up, measures in turn, and derives."""
        scenario = self.scenario
        finished: dict[str, Rollout] = {}
        if epsilon is None:
            epsilon = self._calibrated() if scenario.guided else 0.0
        spec = scenario.spec(self.batch, BLOCK)
        refill = spec.num_refill(self.rows, self.batch)
        moments = snapshots(
            self.lengths, np.asarray(self.prompts.length), self.batch, refill, MOMENTS
        )
        width = scenario.prompt_length
        parts = phases.Phases(self.pair, spec, self.rows, width, moments, epsilon)

        def one(name: str) -> tuple[measure.Sample, Rollout | None]:
            if name in self.peers:
                return self.peers[name].run(name), None
            limit = float("inf") if _unlimited(name) else scenario.seconds_each
            contender = self.contenders[name]
            return measure.sample(
                lambda heard: contender(self.prompts, epsilon, self.key, heard), limit
            )

        def timed(name: str) -> None:
            self.samples[name].append(one(name)[0])
            report.told(name, self.samples[name][-1])

        def phase_round() -> None:
            for name, seconds in parts.seconds().items():
                self.phases[name].append(seconds)

        names = [*self.contenders, *self.peers]
        for name in self.contenders:  # compiles, and warms up
            warm, rollout = one(name)
            report.told(f"{name}, first run", warm)
            if rollout is not None:
                finished[name] = rollout
        tasks = {name: (lambda name=name: timed(name)) for name in names}
        tasks |= {"phases": phase_round, "rates": self._rate_round}
        measure.interleave(tasks, scenario.repeats)
        report.paired(names, self.samples)
        return self._derive(epsilon, parts, finished)

    def _rate_round(self) -> None:
        """What the hardware can do is the best that it was seen to do."""
        again = roofline.measure_rates(small=self.scenario.name == "tiny")
        self.rates = roofline.Rates(*map(max, self.rates, again))

    def _calibrated(self) -> float:
        guide = next(n for n in (report.ENGINE, *self.contenders) if n in self.contenders)
        epsilon, _ = measure.calibrate(
            self.contenders[guide], self.prompts, self.key, self.scenario.correction_rate
        )
        return epsilon

    def _derive(
        self, epsilon: float, parts: phases.Phases, finished: dict[str, Rollout]
    ) -> dict[str, Any]:
        scenario = self.scenario
        sizes = {name: _block_size(name) for name in self.contenders if name != ADAPTIVE}
        seconds = {name: float(np.median(values)) for name, values in self.phases.items()}
        solvers = parts.solvers()
        context = parts.context
        readings = solvers["newton"]["readings"]
        roof = roofline.bound(
            scenario.student, scenario.teacher, self.batch, BLOCK, context, readings, self.rates
        )
        contenders = report.describe(self.samples, sizes)
        for name, figures in contenders.items():
            ideal = self._roofline_speed(name, figures, context, readings)
            if ideal is not None:
                figures["roofline_tokens_per_second"] = ideal
                figures["share_of_roofline"] = figures["tokens_per_second"]["median"] / ideal
        part = {
            "rows": self.rows,
            "tokens": int(self.lengths.sum()),
            "lengths": report.median_length(self.lengths),
            "epsilon": epsilon,
            "mean_tv": _mean_tv(finished),
            "contenders": contenders,
            "phases": seconds,
            "solvers": solvers,
            "roofline": roof,
            "temporary_bytes": memory.wave_memory(
                self.pair,
                scenario.spec(self.batch, BLOCK),
                self.batch,
                scenario.prompt_length,
            ),
            "tokens_equal_to_engine": _equal_tokens(finished),
        }
        if report.ENGINE in contenders and STUDENT_ONLY in contenders:
            part["wave"] = report.wave_split(
                contenders[report.ENGINE], seconds, self.batch, BLOCK, parts.prefill_prompts
            )
            part["exact_q"] = report.exact_q(contenders, seconds, BLOCK)
        return part

    def _roofline_speed(
        self, name: str, figures: dict[str, Any], context: float, readings: float
    ) -> float | None:
        """Tokens/s if every step or wave took its roofline time, with the waves it really took."""
        # Of waves of several sizes one cannot be counted for all.
        if not figures["waves"] or name in self.peers or name == ADAPTIVE:
            return None
        scenario, size = self.scenario, _block_size(name)
        shapes = (scenario.student, scenario.teacher, self.batch, size, context, readings)
        bound = roofline.bound(*shapes, self.rates)
        one = bound["student_step_seconds" if without_teacher(name) else "wave_seconds"]
        return figures["committed"] / (figures["waves"] * one)


def _unlimited(name: str) -> bool:
    return without_teacher(name) or name == ADAPTIVE or name.startswith("engine")


def _block_size(name: str) -> int:
    if without_teacher(name) or name == TOKEN_WISE:
        return 1
    return int(OPTIONS.sub("", name).rsplit("_k", 1)[1])


def _mean_tv(finished: dict[str, Rollout]) -> float:
    """Mean TV(p, q) over all tokens of a guided rollout; 0 where there was none."""
    for name, rollout in finished.items():
        if not without_teacher(name):
            return float(np.asarray(rollout.tv).sum() / np.asarray(rollout.length).sum())
    return 0.0


def _equal_tokens(finished: dict[str, Rollout]) -> dict[str, float]:
    """Share of response tokens that agree with the engine's, for each guided contender."""
    if report.ENGINE not in finished:
        return {}
    engine = finished[report.ENGINE]
    end = int(np.asarray(engine.length).max())  # some have more columns
    valid, tokens = (np.asarray(x)[:, :end] for x in (engine.valid, engine.tokens))
    return {
        name: float((np.asarray(rollout.tokens)[:, :end] == tokens)[valid].mean())
        for name, rollout in finished.items()
        if name != report.ENGINE and not without_teacher(name)
    }
