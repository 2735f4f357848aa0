"""The fixed-prefix probe: which positions, what is measured there, how runs are compared."""

import doctest
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toys
from eval_toys import save_model
from saki_jax.data.prompts import Problem
from saki_jax.data.template import EncodedPrompts
from saki_jax.evals import probe as door
from saki_jax.evals import probe_build, probe_compare, probe_file, probe_measure
from saki_jax.evals.probe_compare import QUARTILES
from saki_jax.evals.probe_file import Probe, ProbeError
from saki_jax.evals.probe_measure import FIGURES, make_measure, position_figures
from saki_jax.rollout.engine import make_rollout
from saki_jax.rollout.keys import step_key
from saki_jax.rollout.spec import RolloutSpec

V, T, EPSILON = 20, 12, 0.3
KEY = step_key(7, 0)


def test_docstrings():
    assert doctest.testmod(probe_compare).failed == 0


# Which positions.


def brute_force(corrected, usable, prompt):
    """The rule of the module's docstring, one candidate at a time."""
    used, pairs = set(), []
    places = [(r, t) for r in range(len(prompt)) for t in range(corrected.shape[1])]
    for name in dict.fromkeys(prompt):
        mine = [(r, t) for r, t in places if prompt[r] == name and usable[r, t]]
        for r, t in mine:
            if not corrected[r, t]:
                continue
            free = [p for p in mine if not corrected[p] and p not in used]
            if free:
                best = min(free, key=lambda p: (abs(p[1] - t), p[0] != r, p[1], p[0]))
                used.add(best)
                pairs.append(((r, t), best))
    return pairs


def test_matching_is_the_rule_it_says():
    rng = np.random.default_rng(0)
    for share in (0.1, 0.4, 0.7):  # with the last, accepted positions run out
        corrected = rng.random((9, 7)) < share
        usable = np.arange(7)[None, :] < rng.integers(0, 8, 9)[:, None]
        prompt = [0, 0, 0, 4, 4, 2, 2, 2, 2]
        found = probe_build.match(corrected, usable, prompt)
        assert [tuple(map(tuple, pair)) for pair in found] == brute_force(corrected, usable, prompt)
        partners = [accepted for _, accepted in found]
        assert len(set(partners)) == len(partners)


def encoded_prompts(count: int = 40) -> EncodedPrompts:
    rng = np.random.default_rng(1)
    length = rng.integers(1, 5, count).astype(np.int32)
    problems = tuple(Problem(f"p{i}", "x", "1", "toy") for i in range(count))
    return EncodedPrompts(problems, rng.integers(1, V, (count, 8)).astype(np.int32), length)


@pytest.fixture(scope="module")
def toy():
    """(model, student's table, teacher's table, guided rollout)."""
    model = toys.lookup_model(V)
    teacher = toys.random_table(0, V, scale=2.0)
    student = toys.blend(teacher, toys.random_table(1, V, scale=2.0), 0.5)
    spec = RolloutSpec(response_length=T, end_ids=(0,), pad_id=0, block_size=4)
    return model, student, teacher, make_rollout(model, model, spec)


def build(toy, count=20, samples=2, **more):
    _, student, teacher, rollout = toy
    return probe_build.build(
        rollout,
        student,
        teacher,
        encoded_prompts(),
        epsilon=EPSILON,
        key=KEY,
        count=count,
        samples=samples,
        **({"prompts_per_batch": 8} | more),
    )


def test_positions_are_genuine_corrections_and_accepted_tokens(toy):
    _, student, teacher, rollout = toy
    probe, encoded = build(toy), encoded_prompts()
    assert probe.corrected.sum() == 20
    assert len(probe) == 40
    # The whole data set rolled out at once draws the same: look the positions up there.
    everything = probe_build._prompts(encoded, np.arange(len(encoded)), 2)
    whole = rollout(student, teacher, everything, EPSILON, KEY)
    tokens, corrected = np.asarray(whole.tokens), np.asarray(whole.corrected)
    seen = set()
    for i in range(len(probe)):
        place = [p.id for p in encoded.problems].index(str(probe.prompt_ids[probe.prompt[i]]))
        prefix = probe.sequence(probe.row[i])[: probe.prefix[i]]
        n, t = encoded.length[place], probe.position[i]
        assert len(prefix) == n + t
        np.testing.assert_array_equal(prefix[:n], encoded.tokens[place, :n])
        rows = [r for r in (2 * place, 2 * place + 1) if (tokens[r, :t] == prefix[n:]).all()]
        assert any(corrected[r, t] == probe.corrected[i] for r in rows)
        seen.add((int(probe.row[i]), int(t)))
        assert probe.prompt[probe.partner[i]] == probe.prompt[i]
        assert probe.partner[probe.partner[i]] == i
    assert len(seen) == len(probe)


def test_the_batch_of_prompts_changes_nothing(toy):
    assert build(toy).fingerprint() == build(toy, prompts_per_batch=40).fingerprint()


def test_too_few_corrections_is_an_error_with_both_numbers(toy):
    with pytest.raises(ProbeError, match=r"40 prompts x 2 samples have \d+ .* 100000 are wanted"):
        build(toy, count=100_000)
    with pytest.raises(ProbeError, match="no corrections: epsilon is 0"):
        probe_build.build(None, None, None, encoded_prompts(), epsilon=0.0, key=KEY, count=1)


def test_a_probe_is_frozen_on_disk(toy, tmp_path):
    probe = build(toy)
    probe = replace(probe, initial={"kl": np.arange(len(probe), dtype=np.float32)})
    file = tmp_path / "probe.npz"
    probe_file.save(file, probe)
    again = probe_file.load(file)
    assert again.fingerprint() == probe.fingerprint()
    for name in ("tokens", "corrected", "partner", "prompt", "position", "prompt_ids"):
        np.testing.assert_array_equal(getattr(again, name), getattr(probe, name))
    np.testing.assert_array_equal(again.initial["kl"], probe.initial["kl"])
    with pytest.raises(ProbeError, match="is frozen"):
        probe_file.save(file, probe)
    (tmp_path / "x.npz").write_text("no")
    with pytest.raises(ProbeError, match=r"x\.npz cannot be read"):
        probe_file.load(tmp_path / "x.npz")
    np.savez(tmp_path / "y.npz", tokens=np.zeros(3))
    with pytest.raises(ProbeError, match="is not a probe: it has no offset"):
        probe_file.load(tmp_path / "y.npz")


# What is measured.


def by_hand(logits_s, logits_t):
    """The definitions in float64."""
    s, t = (np.exp(x - np.logaddexp.reduce(x)) for x in np.float64([logits_s, logits_t]))
    ranked = np.argsort(-t, kind="stable")
    with np.errstate(divide="ignore", invalid="ignore"):
        kl = np.where(t > 0, t * (np.log(t) - np.log(s)), 0.0).sum()
        entropy = -np.where(s > 0, s * np.log(s), 0.0).sum()
    c1, c16 = s[ranked[0]], s[ranked[:16]].sum()
    return {"c1": c1, "c16": c16, "c16_minus_c1": c16 - c1, "kl": kl, "entropy": entropy}


def test_figures_at_every_position_by_hand(toy):
    model, student, teacher, _ = toy
    probe = build(toy)
    found = make_measure(model, model, rows=3, positions=5)(probe, student, teacher)
    for i in range(len(probe)):
        prefix = probe.sequence(probe.row[i])[: probe.prefix[i]].tolist()
        context = toys.context_index(prefix, V, 2)
        want = by_hand(np.asarray(student)[context], np.asarray(teacher)[context])
        for name in FIGURES:
            assert found[name][i] == pytest.approx(want[name], rel=2e-5, abs=2e-6), name


def test_segments_rows_and_chunks_change_nothing(toy):
    model, student, teacher, _ = toy
    probe = build(toy)
    want = make_measure(model, model)(probe, student, teacher)
    for settings in ({"rows": 1, "segment": 4, "positions": 1}, {"rows": 7, "segment": 6}):
        found = make_measure(model, model, **settings)(probe, student, teacher)
        for name in FIGURES:
            np.testing.assert_allclose(found[name], want[name], rtol=1e-6, err_msg=name)


def test_excluded_tokens():
    logits_t = jnp.array([3.0, 2.0, -jnp.inf, 0.0] + [-2.0] * 16)
    logits_s = jnp.array([1.0, 2.0, -jnp.inf, 1.0] + [0.0] * 16)
    found = position_figures(logits_s, logits_t)
    want = by_hand(np.asarray(logits_s), np.asarray(logits_t))
    for name in FIGURES:
        assert float(found[name]) == pytest.approx(want[name], rel=1e-5), name
    # The teacher may say what the student cannot: no finite divergence.
    assert position_figures(logits_s.at[0].set(-jnp.inf), logits_t)["kl"] == jnp.inf
    assert position_figures(logits_t, logits_t)["kl"] == 0.0


def test_a_teacher_of_equal_logits_supports_the_lowest_ids():
    found = position_figures(jnp.arange(20.0), jnp.zeros(20))
    want = by_hand(np.arange(20.0), np.zeros(20))
    assert float(found["c1"]) == pytest.approx(want["c1"], rel=1e-5)
    assert float(found["c16"]) == pytest.approx(want["c16"], rel=1e-5)


def test_memory_does_not_grow_with_positions_times_vocabulary():
    wide = 4000
    model = toys.scripted_model(wide)
    table = jnp.zeros((64, wide))
    n = 200
    probe = Probe(
        tokens=np.ones(n * 4, np.int32),
        offset=np.arange(0, n * 4 + 1, 4),
        row=np.arange(n),
        prefix=np.full(n, 4),
        position=np.zeros(n),
        corrected=np.ones(n, bool),
        partner=np.arange(n),
        prompt=np.zeros(n, int),
        prompt_ids=np.array(["p"]),
        initial={},
        meta={},
    )

    def largest(positions: int) -> int:
        measure = make_measure(model, model, rows=n, positions=positions)
        jaxpr = jax.make_jaxpr(measure.figures)(
            table, table, *probe_measure._batches(probe, n, 512)[0][:2]
        )
        return max(v.aval.size for v in _all_outputs(jaxpr.jaxpr) if hasattr(v.aval, "size"))

    assert largest(8) < n * wide // 10
    assert largest(n) >= n * wide  # the check sees such an array where there is one


def _all_outputs(jaxpr):
    for equation in jaxpr.eqns:
        yield from equation.outvars
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _all_outputs(getattr(value, "jaxpr", value))


def _is_jaxpr(value) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


# How runs are compared.


def made_up_probe(prompt, initial_kl, corrected=None):
    n = len(prompt)
    return Probe(
        tokens=np.arange(n),
        offset=np.arange(n + 1),
        row=np.arange(n),
        prefix=np.ones(n),
        position=np.zeros(n),
        corrected=np.ones(n, bool) if corrected is None else np.asarray(corrected),
        partner=np.arange(n),
        prompt=np.asarray(prompt),
        prompt_ids=np.unique(prompt).astype(str),
        initial={"kl": np.asarray(initial_kl, np.float32)},
        meta={},
    )


def figures(values):
    return {name: np.asarray(values, np.float32) for name in FIGURES}


def test_prompts_weigh_equally_in_levels_and_differences():
    probe = made_up_probe([0, 0, 0, 0, 0, 0, 0, 1], np.arange(8))
    run, reference = figures([0.5] * 7 + [0.1]), figures([0.3] * 7 + [0.1])
    found = probe_compare.compare(probe, run, reference, names=("a", "b"), resamples=500)
    assert found.levels["c1"][0].value == pytest.approx(30.0)  # points
    assert found.difference["c1"].value == pytest.approx(10.0)  # not 17.5
    assert found.difference["kl"].value == pytest.approx(0.1)  # nats
    assert found.difference["c1"].clusters == 2


def test_quartiles_are_of_the_initial_divergence_and_their_interaction_by_hand():
    # Two prompts with a position in each quartile; the gain is 0.01 x quartile (0..3).
    kl = [4.0, 3.0, 2.0, 1.0, 1.5, 2.5, 3.5, 4.5]
    quartile = np.array([3, 2, 1, 0, 0, 1, 2, 3])
    probe = made_up_probe([0, 0, 0, 0, 1, 1, 1, 1], kl)
    reference = figures(np.linspace(0.1, 0.2, 8))
    run = figures(np.linspace(0.1, 0.2, 8) + 0.01 * quartile)
    found = probe_compare.compare(probe, run, reference, names=("a", "b"), resamples=500)
    gains = [found.quartiles["c16_minus_c1"][q].value for q in QUARTILES]
    assert gains == pytest.approx([0.0, 1.0, 2.0, 3.0], abs=1e-4)
    interaction = found.quartiles["c16_minus_c1"]["Q4-Q1"]
    assert interaction.value == pytest.approx(3.0, abs=1e-4)
    assert interaction.low == pytest.approx(3.0, abs=1e-4)  # the same in both prompts


def test_the_interaction_covers_and_is_not_seen_where_there_is_none():
    # 120 data sets of 30 prompts x 8 positions with prompt effects; true interaction 2 points.
    rng = np.random.default_rng(0)
    covered = seen = 0
    trials = 120
    for trial in range(trials):
        prompt = np.repeat(np.arange(30), 8)
        kl = rng.random(240)
        shared = rng.normal(0, 0.02, 30)[prompt]
        effect = np.where(probe_compare.quartile_of(kl) == 3, 0.02, 0.0)
        noise = rng.normal(0, 0.02, 240)
        probe = made_up_probe(prompt, kl)
        for true, run in ((2.0, shared + effect + noise), (0.0, shared + noise)):
            found = probe_compare.compare(
                probe,
                figures(run),
                figures(np.zeros(240)),
                names=("a", "b"),
                resamples=300,
                seed=trial,
            ).quartiles["c1"]["Q4-Q1"]
            if true:
                covered += found.low <= true <= found.high
            else:
                seen += not found.low <= 0.0 <= found.high
    # At a coverage of 0.93 these bounds fail with a probability below 1e-4.
    assert covered >= 100
    assert seen <= 20


def test_groups():
    probe = made_up_probe([0] * 8, np.arange(8), corrected=[True, False] * 4)
    run = figures([0.2, 0.4] * 4)
    means = {g: probe_compare.levels(probe, run, group=g)["c1"].value for g in probe_compare.GROUPS}
    assert means == pytest.approx({"all": 30.0, "corrected": 20.0, "accepted": 40.0})
    with pytest.raises(ProbeError, match="no group 'some'"):
        probe_compare.levels(probe, run, group="some")


def test_values_that_are_not_finite_are_refused():
    probe = made_up_probe([0] * 8, np.arange(8))
    with pytest.raises(ProbeError, match="1 of 8 values of saki are not finite"):
        probe_compare.compare(
            probe, figures([np.nan] + [0.0] * 7), figures([0.0] * 8), names=("saki", "trb")
        )


def test_the_commands(tmp_path, capsys):
    student, other, teacher = (save_model(tmp_path / n, seed=i) for i, n in enumerate("sot"))
    probe = str(tmp_path / "probe.npz")
    build = ["build", "--student", str(student), "--teacher", str(teacher), "--addition", "20"]
    build += [
        "--template",
        "raw",
        "--instruction",
        "",
        "--positions",
        "12",
        "--response-length",
        "16",
    ]
    build += ["--samples", "2", "--epsilon", "0.3", "--out", probe]
    assert door.main(build) == 0, capsys.readouterr().err
    assert "24 positions over" in capsys.readouterr().out
    assert door.main(build) == 1
    assert "is frozen" in capsys.readouterr().err
    for name, folder in (("before", student), ("after", other)):
        out = str(tmp_path / f"{name}.npz")
        assert door.main(["measure", probe, "--checkpoint", str(folder), "--out", out]) == 0
    # The student that the probe was built from says what is frozen in it.
    frozen = probe_file.load(probe)
    before, meta = probe_measure.load_figures(tmp_path / "before.npz", frozen)
    for name in FIGURES:
        np.testing.assert_array_equal(before[name], frozen.initial[name])
    assert meta["subject"]["checkpoint"] == str(student)
    capsys.readouterr()
    given = [f"{n}={tmp_path / n}.npz" for n in ("before", "after")]
    assert door.main(["compare", probe, *given, "--out", str(tmp_path / "tables")]) == 0
    assert "run minus before" in capsys.readouterr().out
    found = json.loads((tmp_path / "tables" / "comparisons.json").read_text())
    assert [c["group"] for c in found] == ["all", "corrected", "accepted"]
    assert set(found[0]["figures"]["c1"]["quartiles"]) == {*QUARTILES, "Q4-Q1"}
    assert (tmp_path / "tables" / "tables.md").exists()
    wrong = ["measure", probe, "--checkpoint", str(student), "--teacher", str(other)]
    assert door.main([*wrong, "--out", str(tmp_path / "x.npz")]) == 1
    assert "is not the one of the probe" in capsys.readouterr().err
