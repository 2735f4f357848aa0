"""Graded responses, and the figures of an evaluation that follow from them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from saki_jax.evals.grade import Verdict
from saki_jax.evals.score import counts_by_problem, mean_at_k, mean_pass_at_k
from saki_jax.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Response:
    """One graded sample.

    Attributes:
      problem_id: the problem.
      sample: 0 <= sample < k.
      gold: the answer that it was graded against.
      tokens: response ids, the end token included; ids without a token stay in.
      text: the decoded response.
      verdict: the grader's word.
      finished: ended by an end token; otherwise cut by the length cap.
      nonfinite: stopped because the model emitted NaN.
    """

    problem_id: str
    sample: int
    gold: str
    tokens: tuple[int, ...]
    text: str
    verdict: Verdict
    finished: bool
    nonfinite: bool = False


@dataclass(frozen=True)
class Scores:
    """What an evaluation found; shares are in [0, 1].

    Attributes:
      samples: k.
      problems: number of problems.
      mean_at_k: mean correctness, problems weighted equally.
      pass_at_k: share of problems with at least one right sample of the k.
      verdicts: how many responses got each verdict.
      truncated: share of responses cut by the length cap.
      mean_length: response tokens, the end token included.
      unknown_ids: sampled ids that have no token.
      nonfinite: responses during which the model emitted NaN.
      responses: all of them, problem-major.
    """

    samples: int
    problems: int
    mean_at_k: float
    pass_at_k: float
    verdicts: dict[str, int]
    truncated: float
    mean_length: float
    unknown_ids: int
    nonfinite: int
    responses: tuple[Response, ...]

    def summary(self) -> dict:
        """The figures as a JSON object, without the responses."""
        return {
            f"mean_at_{self.samples}": self.mean_at_k,
            f"pass_at_{self.samples}": self.pass_at_k,
            "problems": self.problems,
            "samples": self.samples,
            "verdicts": self.verdicts,
            "truncated": self.truncated,
            "mean_length": self.mean_length,
            "unknown_ids": self.unknown_ids,
            "nonfinite": self.nonfinite,
        }


def score_responses(responses: Sequence[Response], samples: int, tokenizer: Tokenizer) -> Scores:
    """The figures of graded responses, ``samples`` of them to each problem, in any order."""
    counts = counts_by_problem(
        [r.problem_id for r in responses], [r.verdict is Verdict.CORRECT for r in responses]
    )
    verdicts = Counter(r.verdict.value for r in responses)
    return Scores(
        samples=samples,
        problems=len(counts),
        mean_at_k=mean_at_k(counts),
        pass_at_k=mean_pass_at_k(counts, samples),
        verdicts={v.value: verdicts[v.value] for v in Verdict},
        truncated=float(np.mean([not r.finished for r in responses])),
        mean_length=float(np.mean([len(r.tokens) for r in responses])),
        unknown_ids=sum(tokenizer.count_unknown(r.tokens) for r in responses),
        nonfinite=sum(r.nonfinite for r in responses),
        responses=tuple(responses),
    )
