"""The exact-q loop outside the engine: the same law driven from Python, for comparison.

In each block the devices draft and verify in one jitted call, then the logits of both models leave
them, and NumPy does the rest: bridge, coupling, residual, commitment. With ``block_size=1`` it is
the token-wise prototype. Caches, refill and the names of the random numbers are the engine's, so
tokens and events are too, wherever the two solutions of the bridge agree.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from saki_jax.models.lm import LanguageModel
from saki_jax.rollout import external_bridge as host
from saki_jax.rollout.batch import Counters, Prompts, Rollout
from saki_jax.rollout.external_programs import Programs
from saki_jax.rollout.loop import Progress
from saki_jax.rollout.resident import GUIDED_FIELDS
from saki_jax.rollout.slots import Slots
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.rollout.waiting import check_prompts, make_queue


def make_external(
    student: LanguageModel, teacher: LanguageModel, spec: RolloutSpec
) -> Callable[..., Rollout]:
    """Builds ``rollout(student_params, teacher_params, prompts, epsilon, key, on_progress=None)``.

    Called and answered as the engine's guided rollout (arrays of the result are NumPy's). Call it
    once and keep the result: the compiled programs live in it. One device, no mesh.

    Raises:
      ValueError: different vocabularies, or a teacher sample or another solver than "newton" is
        asked for, which this loop does not have.
    """
    if student.vocab_size != teacher.vocab_size:
        raise ValueError(
            f"the student has {student.vocab_size} logits and the teacher {teacher.vocab_size}; "
            "the bridge between them needs one vocabulary. Use models of one family"
        )
    if spec.teacher_sample or spec.solver != "newton":
        raise ValueError(
            "the external loop is there for comparison: it has solver 'newton' and no teacher "
            f"sample, got solver {spec.solver!r} and teacher_sample={spec.teacher_sample}"
        )
    programs = Programs(student, teacher, spec)

    def rollout(
        student_params: Any,
        teacher_params: Any,
        prompts: Prompts,
        epsilon: float,
        key: jax.Array,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Rollout:
        params = (student_params, teacher_params)
        run = Run(programs, spec, params, jax.tree.map(np.asarray, prompts), float(epsilon), key)
        while True:
            run.admit()
            if not run.slots.alive.any():
                return run.result()
            run.block()
            if on_progress is not None:
                on_progress(run.progress())

    return rollout


class Run:
    """One rollout: its state on the host, its caches on the devices."""

    def __init__(
        self,
        programs: Programs,
        spec: RolloutSpec,
        params: tuple[Any, Any],
        prompts: Prompts,
        epsilon: float,
        key: jax.Array,
    ):
        self.rows = check_prompts(prompts, programs.vocab_size)
        self.programs, self.spec, self.params = programs, spec, params
        self.prompts, self.epsilon, self.key = prompts, epsilon, key
        width, num_slots = prompts.tokens.shape[1], spec.num_slots(self.rows)
        self.caches = programs.init_caches(num_slots, spec.cache_slots(width))
        zero, no = np.zeros(num_slots, np.int32), np.zeros(num_slots, bool)
        fields = {
            name: zero.copy() for name in ("row", "sequence_id", "length", "pending", "count")
        }
        self.slots = Slots(**fields, alive=no.copy(), finished=no.copy(), nonfinite=no.copy())
        self.order, self.next_row = make_queue(prompts, self.rows).row, 0
        self.prefilled = 0
        self.events = {
            name: np.full(
                (self.rows, spec.response_length), spec.pad_id if dtype == jnp.int32 else 0, dtype
            )
            for name, dtype in GUIDED_FIELDS.items()
        }
        self.length = np.zeros(self.rows, np.int32)
        self.finished, self.nonfinite = np.zeros(self.rows, bool), np.zeros(self.rows, bool)
        self.waves = self.row_waves = 0

    def admit(self) -> None:
        """Prefills waiting prompts into free slots, in the engine's order and when it does."""
        slots, spec = self.slots, self.spec
        at_once = spec.num_prefill(self.rows)
        if (~slots.alive).sum() < spec.num_refill(self.rows, len(slots.alive)):
            return
        while self.next_row < self.rows and not slots.alive.all():
            free = np.flatnonzero(~slots.alive)[:at_once]
            row = self.order[self.next_row : self.next_row + len(free)]
            free = free[: len(row)]
            tokens = np.zeros((at_once, self.prompts.tokens.shape[1]), np.int32)
            tokens[: len(row)] = self.prompts.tokens[row]
            target = np.full(at_once, len(slots.alive), np.int32)
            target[: len(row)] = free
            if tokens.shape[1] > 1:
                self.caches = self.programs.prefill(
                    self.caches, self.params, tokens[:, :-1], target
                )
            length = self.prompts.length[row]
            slots.row[free], slots.count[free] = row, 0
            slots.sequence_id[free] = self.prompts.sequence_id[row]
            slots.length[free] = length - 1
            slots.pending[free] = self.prompts.tokens[row, length - 1]
            slots.alive[free] = True
            self.next_row += len(row)
            self.prefilled += int((length > 1).sum())

    def block(self) -> None:
        """Drafts and verifies on the devices, fetches the logits, couples and commits here."""
        self.caches, leaving = self.programs.propose(self.caches, self.params, self.slots, self.key)
        proposal, logits_p, logits_t, v = jax.device_get(leaving)
        slots = np.flatnonzero(self.slots.alive)
        if slots.size < len(self.slots.alive):
            proposal, logits_p, logits_t, v = (
                x[:, slots] for x in (proposal, logits_p, logits_t, v)
            )
        events, usable, bad = self.couple(slots, proposal, logits_p, logits_t, v)
        self.waves += 1
        self.row_waves += slots.size
        self.commit(slots, events, usable, bad)

    def couple(
        self,
        slots: Int[np.ndarray, "n"],
        proposal: Int[np.ndarray, "K n"],
        logits_p: Float[np.ndarray, "K n V"],
        logits_t: Float[np.ndarray, "K n V"],
        v: Float[np.ndarray, "K n"],
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """Events [K, n] of the block, usable positions [n], untrustworthy positions [K, n]."""
        shape, vocab = proposal.shape, logits_p.shape[-1]
        a, b = logits_p.reshape(-1, vocab), logits_t.reshape(-1, vocab)
        solved = host.solve(a, b, self.epsilon)
        at, ids = np.arange(len(a)), proposal.reshape(-1)
        log_p, log_t, log_q, x = (
            term[:, 0] for term in host.terms(solved, a[at, ids][:, None], b[at, ids][:, None])
        )
        events = {
            "tokens": ids.copy(),
            "proposal": ids,
            "corrected": np.zeros(len(a), bool),
            "log_p": log_p,
            "log_t": log_t,
            "log_q": log_q,
            "accept_prob": np.exp(np.minimum(x, 0.0)),
            "beta": solved.beta,
            "kl": solved.kl,
            "tv": solved.tv,
            "entropy": solved.entropy,
            "teacher_mode": solved.teacher_mode,
        }
        rejected = (host.rejects(v.reshape(-1), x) & ~solved.nonfinite).reshape(shape)
        first, stopped = rejected.argmax(axis=0), rejected.any(axis=0)
        if stopped.any():
            row = np.flatnonzero(stopped)
            self.correct(events, solved, a, b, slots[row], first[row], first[row] * shape[1] + row)
        usable = np.where(stopped, first + 1, shape[0])
        events = {name: value.reshape(shape) for name, value in events.items()}
        return events, usable, solved.nonfinite.reshape(shape)

    def correct(
        self,
        events: dict[str, np.ndarray],
        solved: host.HostBridge,
        a: np.ndarray,
        b: np.ndarray,
        slots: np.ndarray,
        offset: np.ndarray,
        at: np.ndarray,
    ) -> None:
        """Draws y ~ [q - p]+ at the rejected rows ``at`` of the flattened block, into events."""
        # Padded to a power of two: a few compiled shapes serve every number of rejections.
        padded = np.resize(np.arange(len(at)), 1 << (len(at) - 1).bit_length())
        position = (self.slots.count[slots] + offset).astype(np.int32)
        noise = self.programs.residual_noise(
            self.key, self.slots.sequence_id[slots][padded], position[padded]
        )
        noise = np.asarray(noise)[: len(at)]
        row, p, t = solved.rows(at), a[at], b[at]
        token, found = host.draw_residual(row, p, t, noise)
        token = np.where(found, token, events["tokens"][at])
        every = np.arange(len(at))
        log_p, log_t, log_q, _ = host.terms(row, p[every, token][:, None], t[every, token][:, None])
        events["tokens"][at], events["corrected"][at] = token, found
        for name, value in {"log_p": log_p, "log_t": log_t, "log_q": log_q}.items():
            events[name][at] = value[:, 0]
        events["tv"][at] = np.where(found, solved.tv[at], 0.0)

    def commit(
        self, slots: np.ndarray, events: dict[str, np.ndarray], usable: np.ndarray, bad: np.ndarray
    ) -> None:
        """Keeps positions up to the first correction, end token or cap (`slots.commit`)."""
        state, size = self.slots, len(bad)
        offset = np.arange(size)[:, None]
        limit = np.minimum(usable, self.spec.response_length - state.count[slots])
        inside = offset < limit
        first_end = _first(np.isin(events["tokens"], self.spec.end_ids) & inside)
        first_bad = _first(bad & inside)
        nonfinite = (first_bad < size) & (first_bad <= first_end)
        finished = first_end < first_bad
        kept = np.minimum(limit, np.minimum(first_end + 1, first_bad))

        k, n = np.nonzero(offset < kept)
        row, column = state.row[slots][n], state.count[slots][n] + k
        for name, value in events.items():
            self.events[name][row, column] = value[k, n]
        some = kept > 0
        state.pending[slots[some]] = events["tokens"][kept[some] - 1, np.flatnonzero(some)]
        state.length[slots] += kept.astype(np.int32)
        state.count[slots] += kept.astype(np.int32)
        going_on = ~finished & ~nonfinite & (state.count[slots] < self.spec.response_length)
        state.alive[slots] = going_on
        row = state.row[slots]
        self.length[row], self.finished[row] = state.count[slots], finished
        self.nonfinite[row] = nonfinite

    def progress(self) -> Progress:
        """What the host knows anyway."""
        unanswered = self.rows - self.next_row + int(self.slots.alive.sum())
        corrections = int(self.events["corrected"].sum())
        committed = int(self.length.sum())
        return Progress(self.rows - unanswered, self.rows, committed, corrections, self.waves)

    def result(self) -> Rollout:
        """The finished rollout."""
        counters = Counters(
            waves=self.waves,
            row_waves=self.row_waves,
            student_forwards=self.waves * self.spec.block_size,
            teacher_forwards=self.waves,
            committed=int(self.length.sum()),
            prefilled=self.prefilled,
        )
        return Rollout(
            prompts=self.prompts,
            length=self.length,
            finished=self.finished,
            nonfinite=self.nonfinite,
            **self.events,
            epsilon=np.float32(self.epsilon),
            counters=counters,
        )


def _first(flags: np.ndarray) -> np.ndarray:
    """Index of the first True down each column of [K, n], K where there is none."""
    return np.where(flags.any(axis=0), flags.argmax(axis=0), len(flags))
