"""Counter-based uniforms and inverse-CDF sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from grpo import sampling
from grpo.sampling import BLOCK, SamplingConfig, random_stream, sample, uniforms


@pytest.fixture(autouse=True, params=[0, 1 << 20], ids=["torch", "compiled"])
def both_ways(request, monkeypatch):
    monkeypatch.setattr(sampling, "FEW_LOGITS", request.param)


def _grid(steps: int, members: int, positions: int, seed: int = 42) -> np.ndarray:
    """Uniforms [steps, members, positions] of one scenario and turn."""
    streams = np.concatenate([random_stream(seed, s, 0, m, 0) for s in range(steps) for m in range(members)])
    return uniforms(np.repeat(streams, positions), np.tile(np.arange(positions), len(streams))).reshape(
        steps, members, positions
    )


def test_uniforms_are_uniform():
    values = _grid(10, 10, 1000).ravel()
    assert 0 < values.min() and values.max() < 1
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    chi2 = ((counts - 1000.0) ** 2 / 1000.0).sum()  # 99 degrees of freedom: mean 99, sd 14
    assert 50 < chi2 < 160
    # The lowest bits, too: a token of probability 1e-4 is drawn from them.
    fraction = np.modf(values * 2**30)[0]
    counts = np.histogram(fraction, bins=100, range=(0, 1))[0]
    assert 50 < ((counts - 1000.0) ** 2 / 1000.0).sum() < 160


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["steps", "members", "positions"])
def test_uniforms_are_independent_along(axis):
    """Neighbours along each axis: no correlation, and a flat joint histogram."""
    values = np.moveaxis(_grid(50, 20, 100), axis, 0)
    first, second = values[:-1].ravel(), values[1:].ravel()
    n = len(first)
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / math.sqrt(n)
    joint = np.histogram2d(first, second, bins=10, range=[[0, 1], [0, 1]])[0]
    assert 50 < ((joint - n / 100) ** 2 / (n / 100)).sum() < 160


def test_every_field_changes_the_stream_and_order_matters():
    base = (42, 1, 2, 3, 4)
    seen = {int(random_stream(*base)[0])}
    for field in range(5):
        for change in (-1, 1, 1000):
            changed = list(base)
            changed[field] += change
            seen.add(int(random_stream(*changed)[0]))
    assert len(seen) == 16
    assert random_stream(1, 2)[0] != random_stream(2, 1)[0]
    assert random_stream(0)[0] != random_stream(0, 0)[0] != 0


def test_known_values_stay():
    """Rollouts of a seed are part of what a run reproduces: changing the hash must be a decision."""
    stream = random_stream(0, 0, 0, 0, 0)
    assert uniforms(stream, np.array([0]))[0] == 0.18402929883049401


def test_same_whatever_the_batch():
    streams = np.concatenate([random_stream(7, 0, s, m, 0) for s in range(4) for m in range(8)])
    positions = np.arange(32)
    together = uniforms(streams, positions)
    order = np.random.default_rng(0).permutation(32)
    assert (uniforms(streams[order], positions[order]) == together[order]).all()
    assert all(uniforms(streams[i : i + 1], positions[i : i + 1])[0] == together[i] for i in range(32))


def test_members_and_steps_give_distinct_completions():
    """Group of 4, vocabulary 64, 16 tokens, 2 steps, flat logits: eight different sequences, and a rerun repeats."""

    def run(seed):
        flat = _grid(2, 4, 16, seed).ravel()
        tokens, _ = sample(torch.zeros(len(flat), 64), torch.from_numpy(flat), SamplingConfig())
        return [tuple(row) for row in tokens.view(8, 16).tolist()]

    assert len(set(run(42))) == 8
    assert run(42) == run(42)
    assert not set(run(42)) & set(run(43))


@pytest.mark.parametrize("temperature, expected", [(0.5, -2.1429), (1.0, -1.4076)])
def test_logprob_is_of_the_scaled_distribution(temperature, expected):
    # Cumulative masses at T=0.5: 0.867, 0.984, 1; at T=1: 0.665, 0.910, 1. 0.9 falls on token 1 in both.
    tokens, logprobs = sample(
        torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.9]).double(), SamplingConfig(temperature)
    )
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(expected, abs=1e-4)
    assert logprobs.dtype == torch.float32


def test_frequencies_follow_the_probabilities():
    n, vocab = 20000, 8
    logits = torch.linspace(-2, 2, vocab)[torch.randperm(vocab, generator=torch.Generator().manual_seed(0))]
    for config in (SamplingConfig(1.0), SamplingConfig(0.7), SamplingConfig(1.3, 0.9)):
        uniform = torch.from_numpy(_grid(1, 1, n).ravel())
        tokens, logprobs = sample(logits.expand(n, vocab), uniform, config)
        probs = torch.zeros(vocab).scatter(0, tokens, logprobs.exp())
        counts = torch.bincount(tokens, minlength=vocab)
        drawn = probs > 0
        assert probs.sum().item() == pytest.approx(1, abs=1e-5)  # all of the distribution's support was seen
        chi2 = ((counts - n * probs)[drawn] ** 2 / (n * probs)[drawn]).sum()
        assert chi2 < 25  # at most 7 degrees of freedom


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    probs = torch.tensor([[0.1, 0.5, 0.15, 0.25]])
    uniform = torch.linspace(0.001, 0.999, 999).double()
    for top_p, support in [(0.4, {1}), (0.49, {1}), (0.51, {1, 3}), (0.8, {1, 2, 3}), (1.0, {0, 1, 2, 3})]:
        tokens, logprobs = sample(probs.log().expand(999, 4), uniform, SamplingConfig(1.0, top_p))
        assert set(tokens.tolist()) == support
        mass = probs[0, sorted(support)].sum()
        torch.testing.assert_close(logprobs.exp(), probs[0, tokens] / mass)


def test_greedy():
    tokens, logprobs = sample(torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([0.999]).double(), SamplingConfig(0))
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(torch.log_softmax(torch.tensor([0.0, 3.0, 1.0]), -1)[1].item())


@pytest.mark.parametrize("uniform", [2.0**-53, 0.5, 1 - 2.0**-53])
def test_impossible_tokens_are_never_drawn(uniform):
    """At the very ends of (0, 1) too, in a large vocabulary whose first and last tokens are impossible."""
    vocab = 151_936
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1))
    logits[:, :1000] = -torch.inf
    logits[:, -1000:] = -torch.inf
    logits[1, 2000:] = -torch.inf
    logits[2, :-2000] = -torch.inf
    logits[3, :] = -torch.inf
    logits[3, 5000] = 0.0
    tokens, logprobs = sample(logits, torch.full((4,), uniform, dtype=torch.float64), SamplingConfig())
    assert torch.isfinite(logprobs).all()
    assert tokens[3].item() == 5000 and logprobs[3].item() == 0


def test_large_vocabulary_cumulative_sum_does_not_stall():
    """One token holds nearly all of the mass, 150k others share 1e-3 of it: in a float32 sum each would round away."""
    vocab = 150_000
    probs = torch.full((vocab,), 1e-3 / (vocab - 1), dtype=torch.float64)
    probs[0] = 0.999
    uniform = torch.tensor([0.9995, 0.99999], dtype=torch.float64)
    tokens, _ = sample(probs.log().expand(2, vocab), uniform, SamplingConfig())
    expected = 1 + (uniform - 0.999) / 1e-3 * (vocab - 1)
    assert (tokens - expected).abs().max() <= 10


def test_a_target_on_the_edge_falls_to_the_next_token_that_can_occur():
    """Masses 0, 1/2, 0, 1/2 and u = 1/2, exactly: tokens 0 and 2 are impossible, 1 is used up."""
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0]])
    tokens, logprobs = sample(logits, torch.tensor([0.5], dtype=torch.float64), SamplingConfig())
    assert tokens.tolist() == [3] and logprobs.item() == pytest.approx(-math.log(2))


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.1}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingConfig(**bad)


@pytest.mark.parametrize("vocab", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 13])
@pytest.mark.parametrize("impossible", ["none", "most", "ends of blocks"])
def test_sampled_in_blocks_as_by_one_running_sum(vocab, impossible):
    """Against the inverse of the whole float64 cumulative distribution, the ends of (0, 1) included."""
    torch.manual_seed(vocab)
    n = 400
    logits = 3 * torch.randn(n, vocab)
    columns = torch.arange(vocab)
    if impossible == "most":
        logits[torch.rand(n, vocab) < 0.9] = -torch.inf
        logits[:, 0] = 0.0
    if impossible == "ends of blocks" and vocab > 2:
        logits[:, (columns % BLOCK > BLOCK - 9) | (columns >= vocab - 2)] = -torch.inf
    uniform = torch.rand(n, dtype=torch.float64)
    uniform[0], uniform[1] = 2.0**-53, 1 - 2.0**-53
    tokens, logprobs = sample(logits, uniform, SamplingConfig(temperature=0.8))
    exact = torch.log_softmax(logits.double() / 0.8, -1)
    cumulative = exact.exp().cumsum(-1)
    upper = cumulative.gather(1, tokens[:, None])[:, 0]
    chosen = exact.gather(1, tokens[:, None])[:, 0]
    lower = upper - chosen.exp()
    assert torch.isfinite(chosen).all()  # never a token of probability 0
    rounding = 1e-6  # float32 masses against float64 ones
    assert ((lower - rounding <= uniform * cumulative[:, -1]) & (uniform * cumulative[:, -1] <= upper + rounding)).all()
    assert torch.allclose(logprobs.double(), chosen, atol=2e-6)


def test_an_improbable_token_at_the_end_of_a_block_gets_nothing_of_what_rounding_leaves():
    rng = torch.Generator().manual_seed(0)
    for vocab in (BLOCK, 2 * BLOCK):
        logits = torch.randn(200, vocab, generator=rng) * 3
        logits[:, BLOCK - 1 :: BLOCK] = -50
        mass = torch.softmax(logits.double(), -1)
        border = mass[:, :BLOCK].sum(-1).clamp(max=1 - 1e-9)
        for shift in (-1e-7, -1e-8, -1e-9, 0.0):
            tokens, _ = sample(logits, border + shift, SamplingConfig())
            assert not ((tokens + 1) % BLOCK == 0).any()


def test_blocks_without_mass_at_the_end_are_not_reached():
    """Rows of a padded vocabulary, and a number next to 1 where masses at the end are too small to add up."""
    logits = torch.full((1, 400 * BLOCK), -torch.inf)
    logits[0, 0] = 0
    logits[0, BLOCK : 390 * BLOCK : BLOCK] = math.log(1.2 * 2**-53)
    token, logprob = sample(logits, torch.tensor([1 - 2.0**-53], dtype=torch.float64), SamplingConfig())
    assert token < 390 * BLOCK and logprob.isfinite()
