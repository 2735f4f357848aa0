"""The grading benchmark: the hostile share is there, and each of them ends as it should."""

import json

import bench_grading as bench


def test_the_mixture():
    pairs = bench.make_pairs(512, 0.05, 0.5, bench.BANK)
    responses = [response for _, response in pairs]
    assert len(pairs) == 512
    slow = {f"\\boxed{{{bench.hanging(n)}}}" for n in range(13)}
    assert len(slow) == 13
    assert slow <= set(responses)
    refused = [f"\\boxed{{{answer}}}" for answer in bench.REFUSED]
    assert sum(response in refused for response in responses) >= 13
    assert pairs == bench.make_pairs(512, 0.05, 0.5, bench.BANK)


def test_it_measures(tmp_path, capsys):
    told = ["--count", "10", "--hostile", "0.2", "--workers", "0,1", "--rounds", "1"]
    result = bench.main([*told, "--limit", "0.5", "--out", str(tmp_path / "new" / "out.json")])
    assert result["1"]["verdicts"]["timeout"] == 1
    assert result["1"]["seconds"][0] >= 0.5
    assert "timeout" not in result["0"]["verdicts"]
    assert sum(result["0"]["verdicts"].values()) == 10
    assert json.loads((tmp_path / "new" / "out.json").read_text()) == result
    assert "exact alone" in capsys.readouterr().out
