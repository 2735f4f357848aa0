"""Evaluations of a run: their files."""

import json

from saki_jax.data import addition
from saki_jax.evals.responses import from_record
from saki_jax.train import loop
from train_runs import small_config


def test_responses_have_the_format_of_the_command(checkpoints, tmp_path):
    config = small_config(checkpoints, steps=1, method="opd", eval__source="addition")
    summary = loop.run(config, tmp_path)
    figures = json.loads((tmp_path / "evaluations" / "student_000001.json").read_text())
    assert figures["mean_at_2"] == summary["student_after"]["mean_at_2"]
    file = tmp_path / "evaluations" / "student_000001.responses.jsonl"
    responses = [from_record(json.loads(line)) for line in file.read_text().splitlines()]
    assert len({(r.problem_id, r.sample) for r in responses}) == 3 * 2
    for response in responses:
        a, b = response.problem_id.removeprefix("addition:").split("+")
        assert response.gold == str(int(a) + int(b))
        ended = response.tokens[-1] == addition.TOKENS.index(addition.END_TOKEN)
        assert response.finished == ended
        assert ended or len(response.tokens) == config.eval.response_length
    assert figures["unknown_ids"] == 0  # each row of these heads has a token
