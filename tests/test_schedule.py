import pytest

from grpo.config import OptimConfig
from grpo.schedule import learning_rate


def config(schedule: str, warmup: int = 2, total: int = 10, peak: float = 1.0) -> OptimConfig:
    return OptimConfig(num_steps=total, learning_rate=peak, lr_schedule=schedule, warmup_steps=warmup)


def test_linear_by_hand():
    rates = [learning_rate(step, config("linear")) for step in range(10)]
    assert rates == [0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]


def test_cosine_by_hand():
    rates = [learning_rate(step, config("cosine", peak=4.0)) for step in range(10)]
    # 2 * (1 + cos(pi * k / 8)): 0, 45, 90, 135 and 180 degrees lie two steps apart.
    assert rates[:3] == [0, 2, 4]
    assert rates[4] == pytest.approx(2 + 2**0.5)
    assert rates[6] == pytest.approx(2)
    assert rates[8] == pytest.approx(2 - 2**0.5)
    assert all(a > b for a, b in zip(rates[2:], rates[3:]))


def test_constant_keeps_the_peak_after_the_warmup():
    assert [learning_rate(step, config("constant", peak=3.0)) for step in (0, 1, 2, 9, 50)] == [0, 1.5, 3, 3, 3]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_ends_at_zero_and_stays_there(schedule):
    assert [learning_rate(step, config(schedule)) for step in (10, 11, 1000)] == pytest.approx([0, 0, 0])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_without_warmup_the_first_step_has_the_peak(schedule):
    assert learning_rate(0, config(schedule, warmup=0, peak=0.1)) == 0.1


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_a_run_shorter_than_its_warmup_only_warms_up(schedule):
    assert [learning_rate(step, config(schedule, warmup=10, total=3)) for step in range(3)] == [0, 0.1, 0.2]


def test_unknown_schedule():
    with pytest.raises(ValueError, match="lr_schedule.*'step'.*cosine"):
        learning_rate(5, config("step"))
