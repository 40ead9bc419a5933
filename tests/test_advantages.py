import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.advantages import group_advantages, has_spread, token_weights


def assert_close(actual, expected, tolerance=1e-12):
    assert [len(group) for group in actual] == [len(group) for group in expected]
    for actual_group, expected_group in zip(actual, expected):
        assert actual_group == pytest.approx(expected_group, abs=tolerance)


# --- advantages -------------------------------------------------------------------------------------------------------


def test_one_winner_in_four_by_hand():
    # mean 0.25, deviations -0.25 * 3 and 0.75; sample std = sqrt((3 / 16 + 9 / 16) / 3) = 0.5
    [advantages] = group_advantages([[0.0, 0.0, 0.0, 1.0]])
    assert advantages == pytest.approx([-0.25 / 0.5001] * 3 + [0.75 / 0.5001], abs=1e-12)
    assert sum(advantages) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    "group",
    [
        [0.15] * 4,
        [0.7],
        [0.1 + 0.2, 0.3, 0.3, 0.3],  # std 5.6e-17: residue of rounding, not a signal
        [0.3, 0.3 + 9e-7],
        [None, None, 0.4, None],
        [None, None],
    ],
)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_without_spread_gets_exactly_zero(group, scale):
    other = [0.0, 1.0]  # keeps the std of the batch away from 0
    assert group_advantages([group, other], scale)[0] == [0.0] * len(group)
    assert not has_spread(group)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_a_small_spread_is_a_spread(scale):
    assert all(abs(a) > 1e-7 for a in group_advantages([[0.3, 0.3 + 2e-6]], scale)[0])
    assert has_spread([0.3, 0.3 + 2e-6])


def test_missing_rewards_are_left_out_of_the_baseline():
    with_gap, without = group_advantages([[0.0, None, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    assert with_gap[1] == 0.0
    assert [a for i, a in enumerate(with_gap) if i != 1] == without


def test_batch_scaling_by_hand():
    # all rewards: 0, 1, 2, 5, mean 2, sample std = sqrt((4 + 1 + 0 + 9) / 3)
    scale = math.sqrt(14 / 3) + 1e-4
    advantages = group_advantages([[0.0, 1.0], [2.0, None, 5.0]], "batch")
    assert_close(advantages, [[-0.5 / scale, 0.5 / scale], [-1.5 / scale, 0.0, 1.5 / scale]])


def test_no_scaling_is_the_distance_to_the_mean():
    assert group_advantages([[0.0, 1.0], [2.0, None, 5.0]], "none") == [[-0.5, 0.5], [-1.5, 0.0, 1.5]]


rewards_strategy = st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=8)


@given(rewards_strategy, st.floats(-5, 5), st.sampled_from(["group", "batch", "none"]))
def test_sum_is_zero_order_is_kept_and_a_shift_changes_nothing(group, shift, scale):
    [advantages] = group_advantages([group], scale)
    assert len(advantages) == len(group)
    assert sum(advantages) == pytest.approx(0, abs=1e-6)
    pairs = sorted((r, a) for r, a in zip(group, advantages) if r is not None)
    assert all(low[1] <= high[1] for low, high in zip(pairs, pairs[1:]))
    if max(map(abs, advantages)) > 1e-2:  # well clear of the spread's threshold, which rounding of the shift may cross
        shifted = group_advantages([[None if r is None else r + shift for r in group]], scale)[0]
        assert shifted == pytest.approx(advantages, abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        group_advantages([[0.0, 1.0], [0.0, bad]])


def test_unknown_scaling():
    with pytest.raises(ValueError, match="'std' is not one of group, batch, none"):
        group_advantages([[0.0, 1.0]], "std")


# --- token weights ----------------------------------------------------------------------------------------------------

PER_EPISODE, PER_TOKEN = ["grpo", "gspo", "sapo"], ["bnpo", "dapo", "cispo"]


@pytest.mark.parametrize(
    ("loss_types", "expected"),
    [
        (PER_EPISODE, [1 / (3 * 2), 1 / (3 * 4), 1 / (3 * 6)]),
        (PER_TOKEN, [1 / 12, 1 / 12, 1 / 12]),
        (["dr_grpo"], [1 / 60, 1 / 60, 1 / 60]),
    ],
)
def test_weights_by_hand(loss_types, expected):
    for loss_type in loss_types:
        assert token_weights([2, 4, 6], loss_type, 20, [True] * 3) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("loss_type", [*PER_EPISODE, *PER_TOKEN, "dr_grpo"])
def test_masked_episodes_leave_numerator_and_denominator(loss_type):
    # A truncated episode (3 sampled tokens, then the length limit) that is masked: the rest weighs as if it had
    # never been sampled.
    masked = token_weights([5, 3, 7], loss_type, 8, [True, False, True])
    alone = token_weights([5, 7], loss_type, 8, [True, True])
    assert masked == [alone[0], 0.0, alone[1]]
    assert min(alone) > 0


@pytest.mark.parametrize("loss_type", [*PER_EPISODE, *PER_TOKEN])
def test_weights_of_all_tokens_add_up_to_one(loss_type):
    counts, kept = [5, 3, 7, 1], [True, False, True, True]
    weights = token_weights(counts, loss_type, 8, kept)
    assert sum(n * w for n, w in zip(counts, weights)) == pytest.approx(1)


@pytest.mark.parametrize("loss_type", [*PER_EPISODE, *PER_TOKEN, "dr_grpo"])
def test_everything_masked_weighs_nothing(loss_type):
    assert token_weights([5, 3], loss_type, 8, [False, False]) == [0.0, 0.0]
    assert token_weights([], loss_type, 8, []) == []


def test_an_episode_without_tokens_counts_as_an_episode():
    weights = token_weights([0, 4], "grpo", 8, [True, True])
    assert weights[1] == 1 / (2 * 4)
    assert math.isfinite(weights[0])


def test_bad_arguments_of_token_weights():
    with pytest.raises(ValueError, match="'ppo'"):
        token_weights([1], "ppo", 8, [True])
    with pytest.raises(ValueError):
        token_weights([1, 2], "grpo", 8, [True])
