"""What travels between the stages, in the order of the algorithm: Turn, Episode, Group, TokenBatch.

Axes: P scenarios per step, G group size, E = P*G episodes, T tokens of a sequence, N kept (trained) tokens.

Everything here is plain data and frozen. Each type's docstring has a small worked example that a test asserts.
Masks come from lengths and roles, never from token ids: a model's own end-of-turn token is a sampled token and is
trained, whatever its id, and padding may share that id.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from env.clarify import EpisodeRecord, StopReason
from grpo.tree_attention import TreeLayout
from scenarios.schema import Scenario


@dataclass(frozen=True)
class Turn:
    """One assistant turn: `completion_ids[start:stop]` of its episode are the sampled ids.

    `text` is those ids decoded (without the end-of-turn token) and only feeds the environment and the log, never
    training. `reply` is the environment's answer, None where the turn ended the episode.

    Example: `Turn(start=13, stop=15, text=..., reply=None)` is the second turn in the example of `Episode`: its ids are
    7 and 151645.
    """

    start: int
    stop: int
    text: str
    reply: str | None


@dataclass(frozen=True)
class Episode:
    """One finished episode as tokens. `completion_ids`, `loss_mask` and `sampler_logprobs` have the same length.

    Example (two turns; 151645 ends a turn, ten tokens of environment reply between them)::

        prompt_ids       [1, 2, 3]
        completion_ids   [5, 6, 151645,  198, 151644, 872, 198, 9, 151645, 198, 151644, 77091, 198,  7, 151645]
        loss_mask        [1, 1, 1,       0,   0,      0,   0,   0, 0,      0,   0,      0,     0,    1, 1]
        turns            start:stop = 0:3, 13:15

    Five tokens are trained. The log-prob of token 7 comes from the logits at completion index 12 (the last
    environment token), that of token 5 from the logits at the last prompt token.

    `sampler_logprobs` are natural-log probabilities under the distribution that was sampled from (after temperature
    and top-p), 0.0 where `loss_mask` is 0. `reward` is None where the environment failed (stop reason `env_error`):
    such an episode is left out of its group's baseline and gets advantage 0.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    record: EpisodeRecord
    reward: float | None
    member: int = 0

    @property
    def num_trained(self) -> int:
        """Sampled tokens, end-of-turn tokens included."""
        return sum(self.loss_mask)

    @property
    def truncated(self) -> bool:
        """True where a length limit, not the model or the environment, ended the episode."""
        return self.stop_reason in (StopReason.TOKEN_CAP, StopReason.CONTEXT_FULL)


@dataclass(frozen=True)
class Group:
    """The G episodes of one scenario: same request, profile, difficulty and prompt ids.

    Example: four members with rewards 0, 0, 0, 1 get advantages -0.5, -0.5, -0.5, 1.5 (to three digits; see
    `grpo.advantages`).
    """

    scenario: Scenario
    episodes: tuple[Episode, ...]

    @property
    def rewards(self) -> list[float | None]:
        return [episode.reward for episode in self.episodes]


@dataclass(frozen=True)
class TokenBatch:
    """One microbatch: the unique tokens of some episodes, and the N positions in them that predict a trained token.

    Packed, the usual form: one row of segments (`grpo.tree_attention`). Example: the episode of `Episode` and a second
    member that samples [6, 151645] after the same prompt give T = 3 + 14 + 1, as a last token predicts nothing::

        input_ids      [[1, 2, 3, 5, 6, ..., 13, 7, 6]]       segments (3, -1), (14, 0), (1, 0)
        predict_cols   [2, 3, 4, 15, 16, 2, 17]               the prompt's last token predicts both first tokens
        targets        [5, 6, 151645, 7, 151645, 6, 151645]
        episode_index  [0, 0, 0, 0, 0, 1, 1]                  advantages[episode_index] gives each token its episode's

    Padded, for models that cannot take that: B rows, padded on the right; `layout` is None.

    Only hidden states at (predict_rows, predict_cols) reach the LM head.
    """

    input_ids: torch.Tensor  # [B, T] int64; B = 1 when packed
    position_ids: torch.Tensor  # [B, T] int64
    predict_rows: torch.Tensor  # [N] int64
    predict_cols: torch.Tensor  # [N] int64
    targets: torch.Tensor  # [N] int64
    episode_index: torch.Tensor  # [N] int64, the episode's index in the whole step, ascending
    sampler_logprobs: torch.Tensor  # [N] float32
    token_weights: torch.Tensor  # [N] float32, the normaliser of the whole optimiser step folded in
    episodes: tuple[int, ...]  # indices of the episodes in it, ascending
    layout: TreeLayout | None = None

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch on `device`."""
        tensors = {name: value for name, value in self.__dict__.items() if isinstance(value, torch.Tensor)}
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in tensors.items()}
        return replace(self, **moved)
