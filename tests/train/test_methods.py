"""Every method in whole runs: finite losses, and the counters that tell it from the others."""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from saki_jax.rollout.keys import step_key
from saki_jax.train import __main__ as command
from saki_jax.train import loop, setup
from saki_jax.train.baselines import EXACT_Q, INTERLEAVED, METHODS
from saki_jax.train.config import ConfigError
from saki_jax.train.validate import validate
from train_runs import small_config

ROOT = Path(__file__).parents[2]
TEACHER_MODE = {"saki", "random_tm", "tv_weighted_tm", "teacher_sampled"}
BRIDGE = ("epsilon", "pinsker_bound", "tv_mean", "kl_mean", "kl_over_epsilon", "beta_mean")


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check_counters(name, lines):
    """What each method's records must and must not show."""
    method = METHODS[name]
    for line in lines:
        assert np.isfinite(line["loss"])
        assert line["skipped_steps"] == 0
        assert line["log_p_gap_max"] <= 1e-3
    guided = [line for line in lines if line["teacher_forwards"] > 0]
    assert bool(guided) == (method.rollout in (EXACT_Q, INTERLEAVED))
    teacher_tokens = sum(line["teacher_mode_rate"] * line["num_valid"] for line in lines)
    corrections = sum(line["corrections"] for line in lines)
    if name in TEACHER_MODE:  # the same budget, wherever it is spent
        assert corrections > 0
        assert round(teacher_tokens) == corrections
    else:
        assert teacher_tokens == 0
    assert all((line["epsilon"] is None) == (name == "skd") for line in lines)
    if name == "skd":
        assert corrections > 0
        assert all(line[figure] is None for line in lines for figure in BRIDGE)
        assert all(line["loss"] == line["loss_forward_kl"] > 0 for line in lines)
    if name == "grpo":
        assert all(0 <= line["reward_mean"] <= 1 for line in lines)
        assert all(line["log_ratio_mean"] is None for line in lines)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_two_steps_of_every_method(name, checkpoints, tmp_path, capsys):
    changes = {"method": name, "steps": 2, "skd__top_k": 3}
    if name == "grpo":
        changes["teacher"] = ""
    loop.run(small_config(checkpoints, **changes), tmp_path)
    check_counters(name, records(tmp_path))
    assert "step 2/2" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS))
def test_twenty_steps_of_the_quickstart_from_the_command_line(name, tmp_path):
    command.main(
        [
            *("--config", str(ROOT / "configs" / "quickstart.py"), f"--config.method={name}"),
            *("--config.steps=20", "--config.eval.problems=16", "--config.eval.samples=2"),
            *("--workdir", str(tmp_path)),
        ]
    )
    lines = records(tmp_path)
    assert len(lines) == 20
    check_counters(name, lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["skd", "grpo"])
def test_eight_devices_make_the_steps_of_one(name, checkpoints, tmp_path):
    runs = []
    for size in (1, 2):
        mesh = {"mesh__data": size, "mesh__fsdp": size, "mesh__tensor": size}
        teacher = {"teacher": ""} if name == "grpo" else {}
        config = small_config(checkpoints, method=name, steps=2, skd__top_k=3, **mesh, **teacher)
        loop.run(config, tmp_path / str(size))
        runs.append(records(tmp_path / str(size)))
    for one, eight in zip(*runs, strict=True):
        assert one["response_tokens"] == eight["response_tokens"]
        np.testing.assert_allclose(one["loss"], eight["loss"], atol=1e-5)


def test_grpo_loads_no_teacher_and_compares_at_least_two_samples(checkpoints):
    session = setup.build(small_config(checkpoints, method="grpo", teacher=""))
    assert (session.pair.teacher, session.pair.teacher_params) == (None, None)
    assert session.evaluate_teacher is None
    with pytest.raises(ConfigError, match=r"data\.samples is 1; grpo compares"):
        small_config(checkpoints, method="grpo", data__samples=1)
    with pytest.raises(ConfigError, match="teacher is empty"):
        small_config(checkpoints, method="opd", teacher="")


def test_a_sample_of_the_teacher_changes_nothing_else_of_the_rollout(checkpoints):
    """All methods with a bridge see one rollout for one seed; this one asks more of the engine."""
    found = []
    for name in ("saki", "teacher_sampled"):
        session = setup.build(small_config(checkpoints, method=name))
        state = session.initial()
        rollout = session.rollout(
            session.copy(state.params),
            session.pair.teacher_params,
            session.next_prompts(),
            0.02,
            step_key(0, 1),
        )
        assert rollout.corrected.any()
        found.append(rollout.replace(teacher_sample=np.zeros(0)))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_the_teacher_construction_is_a_grpo_run_without_a_teacher():
    file = ROOT / "configs" / "teacher_grpo.py"
    spec = importlib.util.spec_from_file_location("teacher_grpo", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = module.get_config("addition")
    validate(small)
    assert (small.method, small.teacher) == ("grpo", "")
    large = module.get_config()
    assert (large.method, large.teacher) == ("grpo", "")
    assert (large.data.prompts_per_step, large.data.samples) == (64, 8)
    assert (large.data.max_prompt_length, large.rollout.response_length) == (1024, 7168)
    assert (large.optimizer.learning_rate, large.objective.ratio_clip) == (1e-6, 0.2)
    with pytest.raises(ConfigError, match="addition, 4b"):
        module.get_config("7b")
