"""Episodes to microbatches: positions, weights, and independence of the split."""

import torch

from env.clarify import StopReason
from grpo.batching import make_microbatches
from grpo.data_types import Episode, TokenBatch


def episode(prompt, completion, mask, logprobs=None, member=0, stop_reason=StopReason.PLAN) -> Episode:
    logprobs = logprobs or [-0.5 * m for m in mask]
    return Episode(tuple(prompt), tuple(completion), tuple(mask), tuple(logprobs), (), stop_reason, None, 1.0, member)


# The worked example of `Episode` and `TokenBatch`.
EXAMPLE = episode(
    [1, 2, 3],
    [5, 6, 151645, 198, 151644, 872, 198, 9, 151645, 198, 151644, 77091, 198, 7, 151645],
    [1, 1, 1] + [0] * 10 + [1, 1],
)


def test_worked_example():
    assert EXAMPLE.num_trained == 5
    (batch,) = make_microbatches([EXAMPLE], [0.2], max_tokens=100)
    assert batch.input_ids.shape == (1, 18)
    assert batch.predict_cols.tolist() == [2, 3, 4, 15, 16]
    assert batch.targets.tolist() == [5, 6, 151645, 7, 151645]
    assert batch.targets.tolist() == batch.input_ids[0, batch.predict_cols + 1].tolist()
    assert batch.episode_index.tolist() == [0] * 5
    assert torch.allclose(batch.token_weights, torch.full((5,), 0.2))
    assert torch.allclose(batch.sampler_logprobs, torch.full((5,), -0.5))


def test_logits_that_depend_on_the_token_before_them_only():
    """Toy model: the logits at a position put everything on (token + 1). The hidden state that predicts token 7 is the
    one of the last environment token, that of token 5 the one of the last prompt token."""
    (batch,) = make_microbatches([EXAMPLE], [1.0], max_tokens=100)
    before = batch.input_ids[batch.predict_rows, batch.predict_cols].tolist()
    assert before == [3, 5, 6, 198, 7]


def test_padding_that_equals_eos_is_not_trained_and_eos_is():
    short = episode([1, 2], [9], [1])
    long = episode([1, 2, 3, 4], [5, 9], [1, 1])
    (batch,) = make_microbatches([short, long], [1.0, 1.0], max_tokens=100, pad_id=9)
    assert batch.input_ids.tolist() == [[1, 2, 9, 9, 9, 9], [1, 2, 3, 4, 5, 9]]
    assert batch.targets.tolist() == [9, 5, 9]  # the model's own end-of-turn token, twice; never a padding 9
    assert batch.predict_cols.tolist() == [1, 3, 4]


def test_any_budget_holds_each_kept_episode_once():
    episodes = [episode([1] * (3 + i), [2] * (1 + i % 4), [1] * (1 + i % 4)) for i in range(13)]
    weights = [0.1 * (i != 5) for i in range(13)]
    for budget in (1, 17, 40, 10_000):
        batches = make_microbatches(episodes, weights, max_tokens=budget)
        rows = sorted(i for batch in batches for i in batch.rows)
        assert rows == [i for i in range(13) if i != 5]  # weight 0 is left out
        for batch in batches:
            assert batch.input_ids.numel() <= budget or len(batch.rows) == 1
            assert batch.episode_index.tolist() == sorted(batch.episode_index.tolist())


def test_no_kept_episode_gives_no_microbatch():
    assert make_microbatches([EXAMPLE], [0.0], max_tokens=100) == []


def test_to_moves_every_tensor():
    (batch,) = make_microbatches([EXAMPLE], [1.0], max_tokens=100)
    moved = batch.to("meta")
    assert isinstance(moved, TokenBatch)
    assert all(v.device.type == "meta" for v in moved.__dict__.values() if isinstance(v, torch.Tensor))
