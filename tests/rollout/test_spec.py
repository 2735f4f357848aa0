"""What a rollout may be asked for."""

import pytest

from saki_jax.rollout.spec import RolloutSpec


def spec(**changes) -> RolloutSpec:
    return RolloutSpec(**{"response_length": 8, "end_ids": (2,), "pad_id": 2, **changes})


@pytest.mark.parametrize(
    "processed", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.05}]
)
def test_s02_a_processed_proposal_distribution_is_refused(processed):
    (name,) = processed
    with pytest.raises(ValueError, match=f"{name} must be"):
        spec(**processed)


def test_s02_plain_sampling_may_be_said_in_any_of_the_usual_ways():
    assert spec(temperature=1.0, top_p=1.0, top_k=None, min_p=0.0) is not None
    assert spec(top_k=0) is not None


@pytest.mark.parametrize("name", ["response_length", "block_size", "waves_per_call"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        spec(**{name: 0})


def test_an_unknown_solver_is_refused():
    with pytest.raises(ValueError, match="newton, bisect, got 'halley'"):
        spec(solver="halley")


@pytest.mark.parametrize(
    ("rows", "slots", "shards", "expected"),
    [(12, 0, 1, 12), (5, 0, 8, 8), (100, 16, 8, 16), (100, 12, 8, 16), (5, 64, 8, 8)],
)
def test_slots_are_a_multiple_of_the_devices(rows, slots, shards, expected):
    assert spec(slots=slots).num_slots(rows, shards) == expected


def test_refill_never_waits_for_more_slots_than_there_are():
    for rows, slots, shards in [(12, 0, 1), (100, 16, 8), (100, 3, 1), (7, 1, 1), (5, 0, 8)]:
        for refill in (0, 1, 1000):
            s = spec(slots=slots, refill_rows=refill)
            wide = s.num_slots(rows, shards)
            assert 1 <= s.num_refill(rows, wide, shards) <= wide
            assert s.num_refill(rows, wide, shards) % shards == 0


def test_no_more_slots_than_fit_into_the_memory_for_caches():
    assert spec().num_slots(64, fit=20) == 20
    assert spec(slots=8).num_slots(64, fit=20) == 8
    assert spec().num_slots(64, shards=8, fit=20) == 16
    with pytest.raises(ValueError, match="does not hold the caches of 8 row"):
        spec(cache_gib=0.5).num_slots(64, shards=8, fit=7)


@pytest.mark.parametrize(
    ("prompt_length", "buckets", "widths"),
    [
        (1, 3, ()),
        (2, 3, (1,)),
        (9, 3, (8,)),
        (41, 1, (40,)),
        (41, 3, (40, 20)),
        (257, 4, (256, 128, 64, 32)),
    ],
)
def test_prompts_are_prefilled_in_a_few_widths(prompt_length, buckets, widths):
    assert spec(prefill_buckets=buckets).prefill_widths(prompt_length) == widths


@pytest.mark.parametrize(
    ("compact", "slots", "shards", "expected"),
    [
        (0, 64, 1, 64),
        (8, 64, 1, 16),
        (8, 57, 1, 15),
        (8, 28, 1, 28),
        (1, 2, 1, 1),
        (1, 1, 1, 1),
        (1, 24, 8, 8),
        (1, 8, 8, 8),
    ],
)
def test_the_last_rows_are_gathered_into_a_quarter_of_the_slots(compact, slots, shards, expected):
    assert spec(compact=compact).compact_slots(slots, shards) == expected


def test_block_sizes_and_their_costs_are_checked():
    s = spec(block_sizes=(2, 16))
    assert s.wave_costs() == (4.5, 18.5)
    assert s.cache_slots(10) == 10 + 8 + 16
    assert spec(block_sizes=(2, 4), block_costs=(1.0, 2.0)).wave_costs() == (1.0, 2.0)
    assert s.for_student_only().cache_slots(10) == 10 + 8 + 1
    with pytest.raises(ValueError, match="1 entries for 2 block_sizes"):
        spec(block_sizes=(2, 4), block_costs=(1.0,))
    with pytest.raises(ValueError, match="block_sizes must be at least 1"):
        spec(block_sizes=(0, 4))
    with pytest.raises(ValueError, match="block_costs must be above 0"):
        spec(block_sizes=(2,), block_costs=(0.0,))
