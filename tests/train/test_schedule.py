import math

import pytest

from saki_jax.train.schedule import epsilon_at

LINEAR = {"kind": "linear", "start": 0.02, "zero_at": 51}


def test_s23_linear_schedule_of_the_paper():
    expected = {1: 0.02, 26: 0.01, 31: 0.008, 50: 0.0004}
    for step, value in expected.items():
        assert math.isclose(epsilon_at(LINEAR, step), value, rel_tol=1e-12)
    for step in (51, 52, 200):
        assert epsilon_at(LINEAR, step) == 0.0


def test_cosine_meets_its_ends_and_middle():
    cosine = {"kind": "cosine", "start": 0.02, "zero_at": 51}
    assert epsilon_at(cosine, 1) == 0.02
    assert math.isclose(epsilon_at(cosine, 26), 0.01, rel_tol=1e-12)
    assert epsilon_at(cosine, 50) > 0
    assert epsilon_at(cosine, 51) == 0.0


def test_constant_and_piecewise():
    assert epsilon_at({"kind": "constant", "start": 0.005}, 10_000) == 0.005
    points = {"kind": "piecewise", "points": ((1, 0.02), (10, 0.01), (20, 0.0))}
    assert [epsilon_at(points, s) for s in (1, 9, 10, 19, 20)] == [0.02, 0.02, 0.01, 0.01, 0.0]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"kind": "exponential"}, "linear, constant, cosine, piecewise"),
        ({"kind": "linear", "start": -0.1, "zero_at": 51}, "finite number of nats"),
        ({"kind": "linear", "start": 0.02, "zero_at": 1}, "2 or later"),
        ({"kind": "constant", "start": math.nan}, "finite"),
        ({"kind": "piecewise", "points": ()}, "rising steps"),
        ({"kind": "piecewise", "points": ((2, 0.1),)}, "the first of them 1"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_in_words(schedule, words):
    with pytest.raises(ValueError, match=words):
        epsilon_at(schedule, 1)


def test_steps_count_from_one():
    with pytest.raises(ValueError, match="from 1"):
        epsilon_at(LINEAR, 0)
