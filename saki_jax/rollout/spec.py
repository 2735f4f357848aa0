"""What a rollout is asked to do, checked once, before anything is compiled."""

from dataclasses import dataclass, replace

SOLVERS = ("newton", "bisect")
_TEACHER_FORWARD = 2.5  # student steps, about the ratio of the paper's models
_NARROWEST_PREFILL = 16  # columns; below, a forward costs the same


@dataclass(frozen=True)
class RolloutSpec:
    """The static side of a rollout; another value of any field is another compiled program.

    Attributes:
      response_length: T, the cap on response tokens, the end token included.
      end_ids: tokens that end a response; the same for student and teacher. May be empty.
      pad_id: what stands behind a response. May be an end id: masks come from lengths.
      block_size: K, proposals drafted a wave. Changes the cost, never the tokens.
      block_sizes: block sizes to choose from between two calls, by the corrections until then (the
        first call uses `block_size`); () = always `block_size`. Each is one more program.
      block_costs: cost of a wave of each of these, in any unit; () = K + 2.5, a student's step for
        each proposal and a teacher's forward of 2.5 of them.
      solver: "newton" (certified) or "bisect" (the paper's 16 waves), see `bridge.solve`.
      slots: rows generated at the same time; 0 = all rows of the batch at once. Fewer slots need
        less cache memory; finished rows make room for the next prompts.
      cache_gib: memory for the key/value caches of all models and prompts, in GiB over all devices
        together; there are no more slots than fit in. 0 = no limit.
      refill_rows: waiting rows are admitted as soon as so many slots are free, and then into all
        that are. 0 = all slots when every row has one, else a quarter of them.
      prefill_prompts: Q, prompts prefilled together. Each is prefilled once for all its samples.
      prefill_buckets: n: prompts are prefilled in P, P/2, .., P/2^(n-1) columns, whichever holds
        the longest of the Q, but not in fewer than 16. Each is one more forward to compile.
      compact: when no row waits and few live, these are gathered into a quarter of the slots, then
        a quarter of those, and so on, but not into fewer than this; 0 = never. Each is one more
        program, compiled in the first rollout.
      waves_per_call: waves (student-only: decode steps) between two reports of progress.
      score_tokens: tokens of a pass when the teacher scores a student-only rollout afterwards.
      teacher_sample: also draw from T at corrections (method `teacher_sampled`).
      temperature, top_p, top_k, min_p: must stay 1, 1, 0, 0 (or None). Any other value would make
        the p of the acceptance test another distribution than the one a proposal was drawn from.
    """

    response_length: int
    end_ids: tuple[int, ...]
    pad_id: int
    block_size: int = 8
    block_sizes: tuple[int, ...] = ()
    block_costs: tuple[float, ...] = ()
    solver: str = "newton"
    slots: int = 0
    cache_gib: float = 0.0
    refill_rows: int = 0
    prefill_prompts: int = 8
    prefill_buckets: int = 3
    compact: int = 8
    waves_per_call: int = 64
    score_tokens: int = 16384
    teacher_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = 0
    min_p: float = 0.0

    def __post_init__(self):
        plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        for name, only in plain.items():
            given = getattr(self, name)
            if given is not None and given != only:
                raise ValueError(
                    f"rollouts sample from the student itself: {name} must be {only}, got {given}. "
                    "A processed proposal would be drawn from another distribution than the p that "
                    "is recorded and tested against q, and the tokens would not follow q"
                )
        for name, least in {
            "response_length": 1,
            "block_size": 1,
            "slots": 0,
            "cache_gib": 0,
            "refill_rows": 0,
            "prefill_prompts": 1,
            "prefill_buckets": 1,
            "compact": 0,
            "waves_per_call": 1,
            "score_tokens": 1,
        }.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.solver not in SOLVERS:
            raise ValueError(f"solver must be one of {', '.join(SOLVERS)}, got {self.solver!r}")
        # A list would make the spec unhashable; ids of another type would compare as floats.
        for name, kind in {"end_ids": int, "block_sizes": int, "block_costs": float}.items():
            object.__setattr__(self, name, tuple(kind(x) for x in getattr(self, name)))
        self._check_block_sizes()

    def _check_block_sizes(self) -> None:
        if any(size < 1 for size in self.block_sizes):
            raise ValueError(f"block_sizes must be at least 1, got {self.block_sizes}")
        if self.block_costs and len(self.block_costs) != len(self.block_sizes):
            raise ValueError(
                f"block_costs has {len(self.block_costs)} entries for {len(self.block_sizes)} "
                "block_sizes; give one for each, or none"
            )
        if any(not cost > 0 for cost in self.block_costs):
            raise ValueError(f"block_costs must be above 0, got {self.block_costs}")

    def num_slots(self, rows: int, shards: int = 1, fit: int | None = None) -> int:
        """W, the slots for a batch of so many rows, a multiple of the devices rows lie on.

        Raises:
          ValueError: fewer slots ``fit`` into `cache_gib` than there are devices.
        """
        wanted = _round_up(rows if self.slots == 0 else min(self.slots, rows), shards)
        if fit is None:
            return wanted
        fit -= fit % shards
        if fit < 1:
            raise ValueError(
                f"cache_gib {self.cache_gib} does not hold the caches of {shards} row(s), one a "
                "device; give more, or shorten response_length or the prompts"
            )
        return min(wanted, fit)

    def num_refill(self, rows: int, slots: int, shards: int = 1) -> int:
        """R, the free slots at which rows are admitted, at most W = ``slots``."""
        default = slots if slots >= rows else slots // 4
        return min(_round_up(self.refill_rows or max(default, 1), shards), slots)

    def num_prefill(self, rows: int, shards: int = 1) -> int:
        """Q, the prompts prefilled together, a multiple of the devices rows lie on."""
        return _round_up(min(self.prefill_prompts, rows), shards)

    def prefill_widths(self, prompt_length: int) -> tuple[int, ...]:
        """The columns of the compiled prefills of prompts of up to P tokens, widest first."""
        widest = prompt_length - 1
        halves = {-(-widest // 2**i) for i in range(self.prefill_buckets)} - {0}
        return tuple(
            sorted((w for w in halves if w in (widest, max(w, _NARROWEST_PREFILL))), reverse=True)
        )

    def compact_slots(self, slots: int, shards: int = 1) -> int:
        """W/4, into which the last rows of W slots are gathered; W where that is not allowed."""
        fewer = _round_up(-(-slots // 4), shards)
        return fewer if 0 < self.compact <= fewer < slots else slots

    def wave_costs(self) -> tuple[float, ...]:
        """The cost of a wave of each of `block_sizes`."""
        return self.block_costs or tuple(k + _TEACHER_FORWARD for k in self.block_sizes)

    def cache_slots(self, prompt_length: int) -> int:
        """S: prompt, response, and K more: a block that starts at the last token still fits."""
        return prompt_length + self.response_length + max(self.block_size, *self.block_sizes, 1)

    def for_student_only(self) -> "RolloutSpec":
        """The same rollout one token a wave; a call of the loop covers as many positions."""
        calls = self.waves_per_call * self.block_size
        blocks = {"block_size": 1, "block_sizes": (), "block_costs": ()}
        return replace(self, **blocks, waves_per_call=calls, teacher_sample=False)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
