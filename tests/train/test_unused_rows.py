"""`mask_unused_rows` from the configuration on: rollout, update, evaluation, probe, all alike."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from saki_jax.data import addition
from saki_jax.evals import checkpoint, probe_file
from saki_jax.evals import probe as door
from saki_jax.evals.checkpoint import find, load
from saki_jax.models import hf
from saki_jax.models.config import Qwen3Config
from saki_jax.models.qwen3 import init_params
from saki_jax.train import loop
from saki_jax.train.config import ConfigError
from saki_jax.train.probing import check_origin
from train_runs import small_config

USED, UNUSED = len(addition.TOKENS), 8


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(student, teacher) with heads of 8 rows more than the tokenizer has tokens."""
    root = tmp_path_factory.mktemp("wide")
    addition.save_tokenizer(root / "tokenizer")
    config = Qwen3Config(
        vocab_size=USED + UNUSED, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4,
        num_kv_heads=2, head_dim=16, initializer_range=0.3,
    )  # fmt: skip
    return tuple(
        hf.save(
            root / name, config, init_params(config, jax.random.key(seed)), dtype="float32",
            tokenizer_from=root / "tokenizer",
        )
        for seed, name in enumerate(("student", "teacher"))
    )  # fmt: skip


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def last_responses(folder, step):
    file = folder / "evaluations" / f"student_{step:06d}.responses.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_masked_no_such_id_is_sampled_and_ratios_are_one(pair, tmp_path):
    config = small_config(pair, mask_unused_rows=True, steps=1, eval__source="addition")
    loop.run(config, tmp_path)
    (line,) = lines(tmp_path)
    assert line["corrections"] > 0
    assert line["unknown_ids"] == 0
    assert line["nonfinite_rows"] == line["skipped_steps"] == 0
    assert line["log_p_gap_max"] <= 1e-4  # ratios are 1
    assert np.isfinite(line["grad_norm"])
    found = last_responses(tmp_path, 1)
    assert max(t for response in found for t in response["tokens"]) < USED
    # Read again, a checkpoint of the run is masked without being asked to be.
    subject = load(find(tmp_path), dtype=np.float32)
    assert subject.masked
    hidden = jax.numpy.ones((1, 32))
    assert (subject.model.logits(subject.params, hidden)[:, USED:] == -np.inf).all()


@pytest.mark.slow
def test_unmasked_they_are_sampled_and_counted(pair, tmp_path):
    loop.run(small_config(pair, steps=1, method="opd", eval__source="addition"), tmp_path)
    (line,) = lines(tmp_path)
    assert line["unknown_ids"] > 0
    tokens = [t for response in last_responses(tmp_path, 1) for t in response["tokens"]]
    figures = json.loads((tmp_path / "evaluations" / "student_000001.json").read_text())
    assert figures["unknown_ids"] == sum(t >= USED for t in tokens) > 0
    assert not load(find(tmp_path), dtype=np.float32).masked


@pytest.mark.slow
def test_the_probe_is_over_the_same_tokens_or_refused(pair, tmp_path, capsys):
    student, teacher = map(str, pair)
    path = tmp_path / "probe.npz"
    told = ["build", "--student", student, "--teacher", teacher, "--addition", "8"]
    told += ["--template", "raw", "--instruction", "", "--positions", "4", "--epsilon", "0.3"]
    told += ["--response-length", "12", "--mask-unused-rows", "--out", str(path)]
    assert door.main(told) == 0
    probe = probe_file.load(path)
    assert probe.meta["mask_unused_rows"]
    assert probe.tokens.max() < USED
    check_origin(probe, small_config(pair, mask_unused_rows=True))
    with pytest.raises(ConfigError, match="built with mask_unused_rows=True, the run has False"):
        check_origin(probe, small_config(pair))
    # A checkpoint that was trained masked is not measured at a probe that was not.
    bare = dataclasses.replace(probe, meta={**probe.meta, "mask_unused_rows": False})
    probe_file.save(tmp_path / "bare.npz", bare)
    masked = lambda source, **kwargs: load(source, dtype=np.float32, masked=True)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "load", masked)
        out = ["--checkpoint", student, "--out", str(tmp_path / "x.npz")]
        assert door.main(["measure", str(tmp_path / "bare.npz"), *out]) == 1
    assert "was trained with mask_unused_rows" in capsys.readouterr().err
