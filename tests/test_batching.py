"""Episodes to microbatches: positions, weights, and independence of the split."""

import pytest
import torch

from env.clarify import StopReason
from grpo.batching import Packing, common_prefix, make_microbatches
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


SECOND = episode([1, 2, 3], [6, 151645], [1, 1], member=1)
PADDED = Packing(packed=False)


def test_worked_example():
    assert EXAMPLE.num_trained == 5
    (batch,) = make_microbatches([EXAMPLE, SECOND], [0.2, 0.1], max_tokens=100)
    assert batch.input_ids.tolist() == [list(EXAMPLE.prompt_ids + EXAMPLE.completion_ids[:-1]) + [6]]
    assert [(s.length, s.parent) for s in batch.layout.segments] == [(3, -1), (14, 0), (1, 0)]
    assert batch.position_ids.tolist() == [[*range(17), 3]]
    assert batch.predict_cols.tolist() == [2, 3, 4, 15, 16, 2, 17]
    assert batch.targets.tolist() == [5, 6, 151645, 7, 151645, 6, 151645]
    assert batch.episode_index.tolist() == [0] * 5 + [1] * 2
    assert torch.allclose(batch.token_weights, torch.tensor([0.2] * 5 + [0.1] * 2))
    assert torch.allclose(batch.sampler_logprobs, torch.full((7,), -0.5))


def test_padded_rows():
    (batch,) = make_microbatches([EXAMPLE, SECOND], [0.2, 0.1], max_tokens=100, packing=PADDED)
    assert batch.input_ids.tolist() == [[*EXAMPLE.prompt_ids, *EXAMPLE.completion_ids[:-1]], [1, 2, 3, 6] + [0] * 13]
    assert batch.layout is None
    assert list(zip(batch.predict_rows.tolist(), batch.predict_cols.tolist())) == [
        (0, 2), (0, 3), (0, 4), (0, 15), (0, 16), (1, 2), (1, 3)
    ]  # fmt: skip
    assert batch.targets.tolist() == [5, 6, 151645, 7, 151645, 6, 151645]


@pytest.mark.parametrize("packing", [Packing(), PADDED, Packing(prefix=(1, 2))], ids=["packed", "padded", "prefix"])
def test_logits_that_depend_on_the_token_before_them_only(packing):
    """Toy model: the logits at a position put everything on (token + 1). The hidden state that predicts token 7 is the
    one of the last environment token, that of token 5 the one of the last prompt token."""
    (batch,) = make_microbatches([EXAMPLE, SECOND], [1.0, 1.0], max_tokens=100, packing=packing)
    before = batch.input_ids[batch.predict_rows, batch.predict_cols].tolist()
    assert before == [3, 5, 6, 198, 7, 3, 6]


def test_padding_id_may_be_trained_and_eos_is():
    short = episode([1, 2], [0, 9], [1, 1])
    long = episode([1, 2, 3, 4], [5, 0, 9], [1, 1, 1])
    (batch,) = make_microbatches([short, long], [1.0, 1.0], max_tokens=100, packing=PADDED)
    assert batch.input_ids.tolist() == [[1, 2, 0, 0, 0, 0], [1, 2, 3, 4, 5, 0]]
    assert batch.targets.tolist() == [0, 9, 5, 0, 9]  # the model's own end-of-turn token, twice; never padding
    assert batch.predict_cols.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("prefix", [(), (1, 1)])
def test_any_budget_holds_each_kept_episode_once(prefix):
    episodes = [episode([1] * (3 + i // 4), [2] * (1 + i % 5), [1] * (1 + i % 5)) for i in range(13)]
    weights = [0.1 * (i != 5) for i in range(13)]
    for budget in (1, 17, 40, 10_000):
        for packing in (Packing(prefix=prefix), PADDED):
            batches = make_microbatches(episodes, weights, max_tokens=budget, packing=packing)
            found = sorted(i for batch in batches for i in batch.episodes)
            assert found == [i for i in range(13) if i != 5]  # weight 0 is left out
            for batch in batches:
                assert batch.input_ids.numel() <= budget or len(batch.episodes) == 1
                assert batch.episode_index.tolist() == sorted(batch.episode_index.tolist())


def test_a_token_is_in_a_packed_microbatch_once():
    system = [50, 51, 52, 53]
    episodes = [episode(system + [g] * (2 + g), [7] * (2 + m), [1] * (2 + m)) for g in range(3) for m in range(4)]
    (batch,) = make_microbatches(episodes, [1.0] * 12, max_tokens=1000, packing=Packing(prefix=tuple(system)))
    assert batch.input_ids.shape[1] == 4 + (2 + 3 + 4) + 3 * (1 + 2 + 3 + 4)
    assert len(batch.layout.segments) == 1 + 3 + 12


def test_a_prompt_without_the_prefix_is_packed_without_it():
    (batch,) = make_microbatches([EXAMPLE, SECOND], [1.0, 1.0], max_tokens=100, packing=Packing(prefix=(9, 9)))
    assert [(s.length, s.parent) for s in batch.layout.segments] == [(3, -1), (14, 0), (1, 0)]


def test_a_prompt_that_is_the_prefix_hangs_its_members_on_it():
    other = episode([1, 2, 3, 4], [5, 6], [1, 1])
    (batch,) = make_microbatches([other, SECOND], [1.0, 1.0], max_tokens=100, packing=Packing(prefix=(1, 2, 3)))
    assert [(s.length, s.parent) for s in batch.layout.segments] == [(3, -1), (1, 0), (1, 0), (1, 2)]
    assert batch.input_ids[0, batch.predict_cols].tolist() == [4, 5, 3, 6]


def test_tokens_after_the_last_trained_one_are_not_computed():
    trailing = episode([1, 2], [5, 6, 7, 8], [1, 1, 0, 0])
    (batch,) = make_microbatches([trailing], [1.0], max_tokens=100)
    assert batch.input_ids.tolist() == [[1, 2, 5]]


@pytest.mark.parametrize(
    "prompts, prefix",
    [([], ()), ([[1, 2, 3]], (1, 2)), ([[1, 2, 3], [1, 2, 4], [1, 2]], (1,)), ([[1, 9], [2, 9]], ()), ([[5], [5]], ())],
)
def test_common_prefix_leaves_every_prompt_a_token(prompts, prefix):
    assert common_prefix(prompts) == prefix


def test_no_kept_episode_gives_no_microbatch():
    assert make_microbatches([EXAMPLE], [0.0], max_tokens=100) == []
    assert make_microbatches([episode([1], [2, 3], [0, 0])], [1.0], max_tokens=100) == []


def test_to_moves_every_tensor():
    (batch,) = make_microbatches([EXAMPLE], [1.0], max_tokens=100)
    moved = batch.to("meta")
    assert isinstance(moved, TokenBatch)
    assert all(v.device.type == "meta" for v in moved.__dict__.values() if isinstance(v, torch.Tensor))
