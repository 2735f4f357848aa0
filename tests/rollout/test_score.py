"""The teacher's scoring pass over responses that it did not guide."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.models.sharding import make_mesh
from saki_jax.rollout.keys import step_key
from saki_jax.rollout.score import make_score
from toy_engines import END, ORDER, V, prompts, rollout_fn, spec, tables
from toys import context_index, lookup_model, responses

KEY = step_key(0, 1)


@pytest.fixture(scope="module")
def scored():
    return rollout_fn()(*tables(3), prompts(3), 0.0, KEY)


def test_log_t_and_the_mode_are_those_of_the_teacher_at_each_response_token(scored):
    _, teacher = tables(3)
    answers, batch = responses(scored), prompts(3)
    for b, t in zip(*np.nonzero(np.asarray(scored.valid)), strict=True):
        prompt = np.asarray(batch.tokens[b, : int(batch.length[b])]).tolist()
        logits = np.asarray(teacher[context_index((*prompt, *answers[b][:t]), V, ORDER)], float)
        log_t = logits - np.log(np.exp(logits).sum())
        assert float(scored.log_t[b, t]) == pytest.approx(log_t[answers[b][t]], abs=1e-5)
        assert int(scored.teacher_mode[b, t]) == int(np.argmax(log_t))
    padding = ~np.asarray(scored.valid)
    assert padding.any()
    assert not np.asarray(scored.log_t)[padding].any()
    assert (np.asarray(scored.teacher_mode)[padding] == END).all()


@pytest.mark.parametrize("tokens", [1, 40, 100, 10_000])
def test_chunks_of_any_size_give_the_same(scored, tokens):
    """Lines of one row, several lines and passes, everything at once."""
    _, teacher = tables(3)
    score = make_score(lookup_model(V, ORDER), spec(score_tokens=tokens))
    blank = scored.replace(log_t=scored.log_t * 0, teacher_mode=scored.teacher_mode * 0)
    again = score(teacher, blank)
    np.testing.assert_allclose(again.log_t, scored.log_t, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(again.teacher_mode, scored.teacher_mode)


def test_s17_a_row_whose_score_is_not_finite_is_flagged_and_holds_no_nan(scored):
    _, teacher = tables(3)
    prompt = np.asarray(prompts(3).tokens[1, : int(prompts(3).length[1])]).tolist()
    bad = teacher.at[context_index(prompt, V, ORDER), 1].set(jnp.nan)
    again = make_score(lookup_model(V, ORDER), spec())(bad, scored)
    assert bool(again.nonfinite[1])
    assert np.isfinite(np.asarray(again.log_t)).all()
    good = ~np.asarray(again.nonfinite)
    assert good.any()
    np.testing.assert_allclose(again.log_t[good], scored.log_t[good], rtol=0, atol=1e-6)


def test_one_program_whatever_the_lengths_and_no_array_of_all_logits(scored):
    _, teacher = tables(3)
    lookups = []
    model = lookup_model(V, ORDER)

    def logits(params, hidden):
        lookups.append(hidden.shape)
        return model.logits(params, hidden)

    score = make_score(dataclasses.replace(model, logits=logits), spec(score_tokens=40))
    score(teacher, scored)
    traced = len(lookups)
    assert max(np.prod(shape[:-1]) for shape in lookups) < scored.tokens.size
    for length in (scored.length * 0, scored.length * 0 + 1):
        again = score(teacher, scored.replace(length=length))
        valid = np.asarray(again.valid)
        np.testing.assert_allclose(
            np.asarray(again.log_t)[valid], np.asarray(scored.log_t)[valid], rtol=0, atol=1e-6
        )
        assert not np.asarray(again.log_t)[~valid].any()
    assert len(lookups) == traced


@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 2, 2)])
def test_eight_devices_give_the_same(scored, eight_devices, mesh):
    _, teacher = tables(3)
    mesh = make_mesh(*mesh, devices=eight_devices)
    again = make_score(lookup_model(V, ORDER), spec(score_tokens=60), mesh)(teacher, scored)
    np.testing.assert_allclose(again.log_t, scored.log_t, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(again.teacher_mode, scored.teacher_mode)


def test_the_rest_of_the_rollout_is_untouched(scored):
    _, teacher = tables(3)
    again = make_score(lookup_model(V, ORDER), spec())(teacher, scored)
    for name in ("tokens", "length", "finished", "log_p", "counters", "prompts"):
        for x, y in zip(
            jax.tree.leaves(getattr(again, name)),
            jax.tree.leaves(getattr(scored, name)),
            strict=True,
        ):
            np.testing.assert_array_equal(x, y, err_msg=name)
