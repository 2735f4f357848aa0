"""The guided engine on scripted and lookup models: what is committed, recorded and counted."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.rollout.engine import make_guided
from saki_jax.rollout.keys import step_key
from saki_jax.rollout.spec import RolloutSpec
from toys import point_logits, prompts_of, responses, scripted_model

V = 32
END = 31
PAD = 0
FORCE = 1e4  # a budget under which q = T whatever T is
LONGEST = 11


@cache
def scripted_engine(response_length: int, block_size: int, teacher_sample: bool = False):
    model = scripted_model(V)
    spec = RolloutSpec(
        response_length=response_length,
        end_ids=(END,),
        pad_id=PAD,
        block_size=block_size,
        teacher_sample=teacher_sample,
        compact=0,
    )
    return make_guided(model, model, spec)


def scripted_run(
    script: list[tuple[int, int]], response_length: int = LONGEST, block_size: int = 4
):
    """Runs one row whose position t proposes script[t][0] and wants script[t][1] (equal: accept).

    Both models put all but e^-60 on one token, and epsilon lets q be T: a proposal is accepted
    where both agree and corrected to the teacher's token where not. Behind the script the row ends.
    """
    script = script + [(END, END)] * (LONGEST - len(script))
    student = jnp.stack([point_logits(z, V) for z, _ in script])
    teacher = jnp.stack([point_logits(y, V) for _, y in script])
    run = scripted_engine(response_length, block_size)
    return run(student, teacher, prompts_of([[1]]), FORCE, step_key(0, 1))


def accepted(*tokens: int) -> list[tuple[int, int]]:
    return [(t, t) for t in tokens]


def test_s19_a_fully_accepted_block_commits_exactly_k_tokens_and_no_bonus():
    rollout = scripted_run(accepted(*range(2, 13)))
    assert responses(rollout) == [tuple(range(2, 13))]
    assert int(rollout.counters.waves) == 3
    assert int(rollout.counters.committed) == LONGEST
    assert int(rollout.counters.student_forwards) == 12
    assert int(rollout.counters.teacher_forwards) == 3
    assert not rollout.corrected.any()
    np.testing.assert_allclose(rollout.accept_prob, 1.0)


def test_s11_nothing_stands_behind_an_end_token_inside_a_block():
    rollout = scripted_run(accepted(11, 12, END, 14, 15))
    assert responses(rollout) == [(11, 12, END)]
    assert rollout.tokens[0].tolist() == [11, 12, END] + [PAD] * 8
    assert rollout.valid[0].tolist() == [True] * 3 + [False] * 8
    assert bool(rollout.finished[0])
    assert int(rollout.counters.committed) == 3
    assert not rollout.corrected.any()
    for name in ("log_p", "log_t", "log_q", "accept_prob", "beta", "kl", "tv", "entropy"):
        assert not getattr(rollout, name)[0, 3:].any(), name
    for name in ("proposal", "teacher_mode", "teacher_sample"):
        assert (getattr(rollout, name)[0, 3:] == PAD).all(), name


def test_s12_a_rejected_end_token_does_not_end_the_row():
    rollout = scripted_run([(11, 11), (END, 9), (13, 13), (14, 14)])
    assert responses(rollout) == [(11, 9, 13, 14, END)]
    assert rollout.corrected[0, :5].tolist() == [False, True, False, False, False]
    assert rollout.proposal[0, :5].tolist() == [11, END, 13, 14, END]
    assert int(rollout.counters.waves) == 2


def test_s12_an_end_token_that_is_a_correction_ends_the_row():
    rollout = scripted_run([(11, 11), (12, END), (13, 13), (14, 14)])
    assert responses(rollout) == [(11, END)]
    assert bool(rollout.finished[0])
    assert rollout.corrected[0].tolist() == [False, True] + [False] * 9
    assert int(rollout.teacher_mode[0, 1]) == END


def test_s13_an_end_token_within_the_cap_is_the_reason_to_stop():
    rollout = scripted_run(accepted(10, 11, END, 20, 21, 22), 5, 8)
    assert responses(rollout) == [(10, 11, END)]
    assert bool(rollout.finished[0])
    assert not bool(rollout.truncated[0])


def test_s13_an_end_token_behind_the_cap_is_not():
    rollout = scripted_run(accepted(10, 11, 12, 13, 14, END), 5, 8)
    assert responses(rollout) == [(10, 11, 12, 13, 14)]
    assert not bool(rollout.finished[0])
    assert bool(rollout.truncated[0])


def test_an_end_token_at_the_last_place_finishes_the_row():
    rollout = scripted_run(accepted(10, 11, 12, 13, END), 5, 8)
    assert responses(rollout) == [(10, 11, 12, 13, END)]
    assert bool(rollout.finished[0])


@pytest.mark.parametrize(("cap", "block", "waves"), [(11, 4, 3), (5, 8, 1)])
def test_s14_the_length_cap_cuts_inside_a_block(cap, block, waves):
    rollout = scripted_run(accepted(*range(2, 13)), cap, block)
    assert responses(rollout) == [tuple(range(2, 2 + cap))]
    assert int(rollout.counters.waves) == waves
    assert not bool(rollout.finished[0])


def test_a_correction_behind_the_length_cap_is_not_counted():
    rollout = scripted_run([*accepted(2, 3, 4, 5, 6), (7, 8)], 5, 8)
    assert responses(rollout) == [(2, 3, 4, 5, 6)]
    assert not rollout.corrected.any()


def test_a_teacher_sample_is_drawn_from_the_teacher_at_corrections_only():
    # The teacher spreads over tokens 5..8; the student insists on 2.
    spread = np.where((np.arange(V) >= 5) & (np.arange(V) < 9), 30.0, 0.0).astype(np.float32)
    student = jnp.stack([point_logits(2, V)] * 2)
    teacher = jnp.stack([jnp.asarray(spread), jnp.asarray(point_logits(2, V))])
    rows = 4000
    run = scripted_engine(2, 2, teacher_sample=True)
    r = run(student, teacher, prompts_of([[1]] * rows), FORCE, step_key(0, 1))
    assert r.corrected[:, 0].all()
    assert not r.corrected[:, 1].any()
    assert (r.teacher_sample[:, 1] == PAD).all()
    counts = np.bincount(np.asarray(r.teacher_sample[:, 0]), minlength=V)
    assert counts[5:9].sum() == rows
    # 5 sigma of a binomial share of 1/4; the failure probability is below 3e-6.
    sigma = np.sqrt(0.25 * 0.75 / rows)
    assert np.abs(counts[5:9] / rows - 0.25).max() < 5 * sigma
    # A purpose of its own: independent of the correction drawn at the same position.
    same = (np.asarray(r.teacher_sample[:, 0]) == np.asarray(r.tokens[:, 0])).mean()
    assert abs(same - 0.25) < 5 * sigma
