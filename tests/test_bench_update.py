"""The benchmark of the training step: equal tokens in all splits, operations counted by hand."""

import json

import bench_update
import numpy as np
import pytest
from bench import update
from bench.presets import PRESETS as PAIRS


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    """What the preset `tiny` writes."""
    out = tmp_path_factory.mktemp("bench") / "new" / "update.json"
    bench_update.main(["--preset", "tiny", "--out", str(out)])
    return json.loads(out.read_text())


def test_the_same_tokens_in_every_split_and_one_program_for_all(result):
    same = [result["splits"][name] for name in ("even", "heavy-tailed", "extreme")]
    assert {split["responses"] for split in same} == {16 * 6}
    assert {split["tokens"] for split in same} == {16 * (6 + 3 - 1)}
    assert [split["longest"] for split in same] == [6, 24, 24]
    assert result["compiled_programs"] == 1


def test_passes_follow_the_tokens(result):
    splits = result["splits"]
    passes = [splits[name]["passes"] for name in ("even", "heavy-tailed", "extreme")]
    assert max(passes) <= 1.3 * min(passes)
    assert splits["all columns"]["passes"] > 2 * max(passes)
    for split in splits.values():
        assert split["filled"] == split["tokens"] / split["slots"] <= 1


def test_every_figure_has_its_range_and_the_ratios_are_there(result):
    assert set(result["over_even"]) == {"heavy-tailed", "extreme"}
    assert set(result["step"]) == {"generation", "update", "weight_sync", "whole"}
    for group in ("over_even", "seconds", "step"):
        for figure in result[group].values():
            assert 0 < figure["lowest"] <= figure["median"] <= figure["highest"]
    parts = [result["step"][name]["lowest"] for name in ("generation", "update", "weight_sync")]
    assert result["step"]["whole"]["highest"] >= sum(parts)
    for split in result["splits"].values():
        assert split["flops_per_second"]["median"] > 0
        assert split["share_of_matmul"] > 0


@pytest.mark.parametrize("preset", ["tiny", "cpu", "h200"])
def test_splits_are_what_they_say(preset):
    scenario = bench_update.PRESETS[preset]
    splits = scenario.splits()
    total = scenario.rows * scenario.mean_length
    for name in ("even", "heavy-tailed", "extreme"):
        lengths = splits[name]
        assert lengths.sum() == total
        assert lengths.min() >= 1
        assert lengths.max() <= scenario.response_length
    assert np.median(splits["extreme"]) == 1
    assert len(np.unique(splits["even"])) == 1


def test_training_operations_by_hand():
    config = PAIRS["tiny"].student
    # D 16, FF 32, H 2, G 1, C 8, V 64, one layer.
    layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 32
    read = [3 + 4 - 1, 3 + 1 - 1]  # prompts of 3, responses of 4 and 1; the row without one is out
    attention = 4 * 16 * sum(n**2 / 2 for n in read)
    expected = 3 * (2 * layer * sum(read) + 2 * 64 * 16 * 5 + attention)
    assert update.training_flops(config, 3, np.array([4, 1, 0])) == expected
