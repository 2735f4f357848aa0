import io
import json
import math

import numpy as np
import pytest

from saki_jax.rollout.loop import Progress
from saki_jax.train.metrics import MetricsWriter, correction_rates, rollout_stats
from saki_jax.train.progress import Reporter, summary_table
from train_toys import make_rollout


def test_means_are_over_the_valid_tokens_of_sound_rows():
    nan = float("nan")
    rollout = make_rollout(
        [[1], [1], [1]],
        [[2, 3], [4], [5, 6, 7]],
        log_p=[[-1.0, -3.0], [-2.0], [nan] * 3],
        log_t=[[-2.0, -2.0], [-4.0], [nan] * 3],
        corrected=[[True, False], [False], [True] * 3],
        nonfinite=[False, False, True],
        junk=nan,
    )
    stats = rollout_stats(rollout, 7)
    np.testing.assert_allclose(stats["correction_rate"], 1 / 3, rtol=1e-6)
    assert stats["corrections"] == 1
    np.testing.assert_allclose(stats["log_ratio_mean"], (1 - 1 + 2) / 3, rtol=1e-6)
    assert stats["nonfinite_rows"] == 1
    assert stats["unknown_ids"] == 0
    assert rollout_stats(rollout, 3)["unknown_ids"] == 2  # 3 and 4; 5, 6, 7 are of the bad row
    assert stats["response_tokens"] == 6
    assert stats["response_length"] == 2.0
    assert stats["response_length_max"] == 3.0
    assert stats["truncation_rate"] == 0.0


def test_every_line_is_json_with_null_for_nan(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "tensorboard")
    writer.write({"step": 1, "loss": math.nan, "kl_over_epsilon": None, "tokens": 5})
    writer.write({"step": 2, "loss": 0.25, "kl_over_epsilon": math.inf, "tokens": 6})
    writer.close()
    refuse = pytest.fail

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert rows[0] == {"step": 1, "loss": None, "kl_over_epsilon": None, "tokens": 5}
    assert rows[1]["loss"] == 0.25
    assert rows[1]["kl_over_epsilon"] is None


def test_correction_rates_weigh_steps_by_their_tokens():
    records = [
        {"epsilon": 0.02, "corrections": 3, "response_tokens": 100},
        {"epsilon": 0.01, "corrections": 1, "response_tokens": 300},
        {"epsilon": 0.0, "corrections": 0, "response_tokens": 50},
    ]
    assert correction_rates(records) == {"epsilon_above_0": 0.01, "epsilon_0": 0.0}
    assert correction_rates(records[:2])["epsilon_0"] is None


class Terminal(io.StringIO):
    """A stream that says it is a terminal, or not."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal

    @property
    def text(self):
        return self.getvalue()


RECORD = {
    "step": 1,
    "epsilon": 0.02,
    "loss": -0.5,
    "correction_rate": 0.0123,
    "response_length": 20.0,
    "tokens_per_second": 1000.0,
}


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_shows_what_matters_while_a_step_runs(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal(terminal)
    reporter = Reporter(10, stream=stream)
    reporter._quiet_seconds = 0.0
    reporter.begin("step 1")
    reporter.during(Progress(rows_done=3, rows_total=8, committed=200, corrections=2, waves=9))
    if terminal:
        reporter._bar.refresh()
    assert "rows 3/8" in stream.text
    assert "corrections 1.00%" in stream.text
    assert "tokens/s" in stream.text
    reporter.step_done(RECORD)
    reporter.close()
    assert "0.0200" in stream.text
    assert "1.23%" in stream.text


def test_processes_but_the_first_say_nothing():
    stream = Terminal(False)
    reporter = Reporter(10, stream=stream, quiet=True)
    reporter.step_done(RECORD)
    assert stream.text == ""


def test_the_table_has_the_scores_and_ranks_nothing():
    scores = {"mean_at_8": 0.5, "pass_at_8": 0.75}
    summary = {
        "method": "saki",
        "seed": 1,
        "steps": 5,
        "samples": 8,
        "teacher": scores,
        "student_before": None,
        "student_after": scores,
        "correction_rate": {"epsilon_above_0": 0.0123, "epsilon_0": None},
        "note": "One run.",
    }
    stream = Terminal(False)
    Reporter(5, stream=stream).show(summary_table(summary))
    for words in ("Mean@8", "Pass@8", "50.0%", "75.0%", "1.23%", "student, after", "One run."):
        assert words in stream.text
    assert "best" not in stream.text
