"""The rollout benchmark: equal work for all contenders, and bounds that mean what they say."""

import dataclasses
import json
import sys

import bench_rollout
import jax
import numpy as np
import pytest
from bench import contenders, measure, peers, report, roofline
from bench import scenario as scenarios
from bench.presets import PRESETS
from bench.snapshots import snapshots
from bench.table import table

from saki_jax.models.config import PRESETS as MODELS
from saki_jax.models.qwen3 import init_params
from saki_jax.rollout.generate import make_generate
from saki_jax.rollout.keys import Purpose, step_key
from saki_jax.rollout.loop import Progress


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    """What the preset `tiny` writes."""
    out = tmp_path_factory.mktemp("bench") / "new" / "bench.json"
    bench_rollout.main(["--preset", "tiny", "--out", str(out)])
    return json.loads(out.read_text())


def test_the_result_has_what_is_asked_of_it(result):
    assert {"preset", "commit", "date", "machine", "versions", "rates", "pair"} <= set(result)
    assert result["machine"]["cores"] >= 1
    assert set(result["batches"]) == set(result["exact_q"]) == {"2"}
    summary = result["exact_q"]["2"]
    assert {"ratio_to_student_only", "bound", "over_external", "correction_rate"} <= set(summary)
    assert all(value > 0 for value in summary.values())
    batch = result["batches"]["2"]
    assert {"step", "draft", "draw", "verify", "bridge", "couple", "commit", "prefill"} <= set(
        batch["phases"]
    )
    assert batch["temporary_bytes"]["wave"] > 0
    assert batch["solvers"]["bisect"]["readings"] == 18  # survey, beta = 1, sixteen halvings


def test_all_contenders_gave_equally_many_tokens_and_the_guided_ones_the_same(result):
    batch = result["batches"]["2"]
    assert {c["committed"] for c in batch["contenders"].values()} == {batch["tokens"]}
    # Two solvers of the bridge and float32 noise between batch shapes: rarely a token differs.
    assert all(share > 0.9 for share in batch["tokens_equal_to_engine"].values())


def test_waves_and_corrections_fit_the_prediction(result):
    engine = result["batches"]["2"]["contenders"]["engine_k8"]
    assert engine["waves"] > 0
    assert engine["committed_per_row_wave"] <= 8
    assert 0.05 < engine["correction_rate"] < 0.2
    assert result["batches"]["2"]["contenders"]["token_wise"]["committed_per_row_wave"] == 1


def test_the_table_names_every_contender_and_the_paper(result):
    text = table(result)
    for words in ("student_only", "token_wise", "roofline", "paper 0.42", "paper 4.22"):
        assert words in text


def test_lengths_are_imposed_on_student_and_engine_alike():
    scenario, pair = scenarios.load_pair(PRESETS["tiny"])
    prompts, lengths = scenario.prompts(5), scenario.lengths(5)
    assert len(set(lengths.tolist())) > 2
    limited = pair._replace(
        student=scenarios.impose_lengths(pair.student, prompts, lengths),
        teacher=scenarios.impose_lengths(pair.teacher, prompts, lengths),
    )
    alone = contenders.build("student_only", limited, lambda k: scenario.spec(2, k))
    rollout = alone(prompts, 0.0, step_key(0, 1), None)
    np.testing.assert_array_equal(rollout.length, lengths)
    assert np.asarray(rollout.finished).all()

    # Without it, random models go on.
    free = make_generate(pair.student, scenario.spec(2))
    rollout = free(pair.student_params, prompts, step_key(0, 1), Purpose.DRAFT)
    assert (np.asarray(rollout.length) != lengths).any()


def test_options_behind_a_name_change_the_rollout_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(contenders, "make_guided", lambda s, t, spec: asked.append(spec))
    monkeypatch.setattr(contenders, "make_generate", lambda s, spec: asked.append(spec))
    scenario, models = PRESETS["tiny"], scenarios.Pair(None, None, None, None)
    for name in ("engine_k4", "engine_k4_compact", "engine_k4_t99", "student_only_compact_t40"):
        contenders.build(name, models, lambda size: scenario.spec(2, size))
    assert [spec.compact for spec in asked] == [8, 1, 8, 1]
    assert [spec.response_length for spec in asked] == [24, 24, 99, 40]
    assert [spec.block_size for spec in asked[:3]] == [4, 4, 4]
    assert scenarios.without_teacher("student_only_compact_t40")
    assert not scenarios.without_teacher("engine_k4_t99")


def test_an_unknown_contender_is_refused():
    with pytest.raises(ValueError, match="no contender is called 'engine'"):
        contenders.build("engine", None, None)


def test_a_lone_checkpoint_is_refused_where_both_models_are_used():
    with pytest.raises(ValueError, match="both student and teacher"):
        scenarios.load_pair(PRESETS["tiny"], student="somewhere")


def test_the_cpu_pair_stands_like_the_papers():
    cpu = PRESETS["cpu"]
    ours = [roofline.shape_of(c) for c in (cpu.student, cpu.teacher)]
    theirs = [roofline.shape_of(MODELS[name]) for name in ("1.7b", "4b")]
    ratio = [pair[1]["parameters"] / pair[0]["parameters"] for pair in (ours, theirs)]
    assert ratio[0] == pytest.approx(ratio[1], rel=0.05)
    for mine, real in zip(ours, theirs, strict=True):
        assert mine["head_share"] == pytest.approx(real["head_share"], rel=0.1)


@pytest.mark.parametrize("tied", [True, False])
def test_the_roofline_counts_the_matrices_that_a_token_meets(tied):
    config = dataclasses.replace(MODELS["tiny"], tie_word_embeddings=tied)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    matrices = sum(x.size for x in jax.tree.leaves(params) if x.ndim == 2)
    looked_up = 0 if tied else config.vocab_size * config.hidden_size
    assert roofline.matrix_size(config) == matrices - looked_up


def test_the_roofline_grows_with_context_rows_and_block():
    student, teacher = MODELS["1.7b"], MODELS["4b"]
    base = roofline.forward(student, 1, 1, 1000)
    assert roofline.forward(student, 1, 1, 2000).bytes > base.bytes
    assert roofline.forward(student, 2, 1, 1000).bytes < 2 * base.bytes  # weights are read once
    assert roofline.forward(student, 2, 1, 1000).flops == 2 * base.flops
    one = roofline.wave(student, teacher, 8, 1, 1000, 4)
    eight = roofline.wave(student, teacher, 8, 8, 1000, 4)
    assert one.bytes < eight.bytes < 8 * one.bytes
    rates = roofline.Rates(copy=5e8, read=1e9, matmul=1e12)
    assert roofline.Work(2e9, 1e12).seconds(rates) == 2.0
    assert roofline.Work(1e9, 3e12).seconds(rates) == 3.0


def test_the_expected_commit_is_the_mean_of_its_law():
    rate, size = 0.07, 8
    stop = [(1 - rate) ** k * rate for k in range(size - 1)]
    mean = sum((k + 1) * p for k, p in enumerate(stop)) + size * (1 - rate) ** (size - 1)
    assert report.expected_commit(rate, size) == pytest.approx(mean)
    assert report.expected_commit(0.0, size) == size
    # No corrections and a free teacher: as fast as the student.
    assert report.speed_bound(0.0, size, 1.0, 0.0) == 1.0
    assert report.speed_bound(0.03, size, 1.0, 2.3) < 0.78


def test_unequal_lengths_are_noticed():
    run = measure.Sample(1.0, 10, 5, 5, 0, True)
    report.paired(["a", "b"], {"a": [run], "b": [run]})
    cut = run._replace(committed=3, complete=False)
    report.paired(["a", "b"], {"a": [run], "b": [cut]})
    with pytest.raises(RuntimeError, match="equally many tokens"):
        report.paired(["a", "b"], {"a": [run], "b": [run._replace(committed=9)]})


def test_contenders_take_turns_and_rounds_begin_with_another_one():
    order: list[str] = []
    tasks = {name: (lambda name=name: order.append(name)) for name in "abc"}
    measure.interleave(tasks, 3)
    assert "".join(order) == "abcbcacab"


def test_a_contender_is_stopped_when_its_time_is_over():
    progress = Progress(0, 9, 40, 2, 5)

    def endless(heard):
        while True:
            heard(progress)

    sample, rollout = measure.sample(endless, 0.01)
    assert rollout is None
    assert (sample.committed, sample.waves, sample.complete) == (40, 5, False)


def test_epsilon_is_tuned_for_the_correction_rate():
    class Stub:
        length = np.array([1000])

        def __init__(self, epsilon):
            rate = min(0.4 * epsilon**0.5, 1.0)
            self.corrected = np.arange(1000) < 1000 * rate

    epsilon, rollout = measure.calibrate(lambda p, e, k, h: Stub(e), None, None, 0.03)
    assert rollout.corrected.mean() == pytest.approx(0.03, rel=0.1)
    assert epsilon > 0


def test_the_moments_are_those_of_the_rollout():
    moments = snapshots(
        lengths=np.array([4, 8, 2, 1, 3]),
        prompt_lengths=np.array([5, 6, 7, 8, 9]),
        num_slots=2,
        refill=1,
        number=10,
    )
    # By hand: 0 and 1 begin; 2 follows 0 after four steps, 3 and 4 follow it; ten steps in all.
    assert [m.row[1].item() for m in moments] == [1] * 8 + [0] * 2
    assert [m.row[0].item() for m in moments] == [0] * 4 + [2, 2, 3, 4, 4, 4]
    assert [m.count[0].item() for m in moments] == [0, 1, 2, 3, 0, 1, 0, 0, 1, 2]
    assert [m.alive[1].item() for m in moments] == [True] * 8 + [False] * 2
    assert [m.start[1].item() for m in moments] == [5 + t for t in range(8)] + [0] * 2


def test_a_peer_is_driven_line_by_line(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text(
        "import json, sys\n"
        "job = json.load(open(sys.argv[1]))\n"
        "print('a banner')\n"
        "print(json.dumps({'ready': ['echo']}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    tokens = sum(job['lengths'])\n"
        "    print(json.dumps({'seconds': 0.5, 'tokens': tokens, 'steps': 3}), flush=True)\n"
    )
    monkeypatch.setitem(peers.CHILDREN, "echo", str(child))
    scenario = PRESETS["tiny"]
    work = peers.job({}, scenario.prompts(3), np.array([4, 5, 6]), 2)
    assert [len(p) for p in work["prompts"]] == scenario.prompts(3).length.tolist()
    peer = peers.Peer("echo", sys.executable, work, tmp_path)
    assert peer.contenders == ["echo"]
    assert peer.run("echo").committed == 15
    peer.close()


def test_a_peer_that_is_not_there_is_told(tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text("raise SystemExit(3)\n")
    monkeypatch.setitem(peers.CHILDREN, "gone", str(tmp_path / "child.py"))
    work = {"batch": 1}
    with pytest.raises(RuntimeError, match="gone process ended with code 3"):
        peers.Peer("gone", sys.executable, work, tmp_path)


@pytest.mark.parity
def test_transformers_answers_with_equally_many_tokens(tmp_path):
    chosen = ["--preset", "tiny", "--contenders", "student_only,engine_k8", "--repeats", "1"]
    result = bench_rollout.main(
        [*chosen, "--batches", "1", "--rows", "3", "--peer", "transformers"]
    )
    contenders = result["batches"]["1"]["contenders"]
    assert {"transformers", "transformers_assisted"} <= set(contenders)
    assert len({c["committed"] for c in contenders.values()}) == 1
