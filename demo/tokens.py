"""The token view: every token of an episode, coloured by what training knows about it.

Ids, mask, advantage and the sampler's log-probs are in the rollout record. KL and gap need a model: the record is
scored by the trainer's own code (`grpo.replay`, `grpo.head`, `grpo.reference`), with the weights that met the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from demo.loading import LOADING, import_trainer
from demo.runs import Run, Unreadable, as_it_is
from demo.views import esc

if TYPE_CHECKING:  # torch takes a second to import: not before somebody looks at tokens
    from grpo.data_types import Episode

COLOURS = {
    "mask": "who wrote it",
    "advantage": "advantage",
    "kl": "KL to the reference",
    "gap": "sampler-trainer gap",
}
"""What tokens can be coloured by, and its name on the page."""

SCORED = ("kl", "gap")  # these need the model

BLUE, VERMILION, GREEN = (0, 114, 178), (213, 94, 0), (0, 158, 115)
"""Of Okabe and Ito's set, as in `grpo.plots`."""
STRONGEST = 0.55  # opacity: text in the page's own colour stays readable on it, light and dark

SMALL = 100 << 20  # bytes of weights


@dataclass(frozen=True)
class Token:
    """One token and its numbers, in nats; None where there is none: for a token that was not sampled, all of them."""

    id: int
    text: str
    trained: bool
    advantage: float | None = None
    sampler: float | None = None  # log-probs
    policy: float | None = None
    reference: float | None = None
    kl: float | None = None
    gap: float | None = None  # policy - sampler


@dataclass(frozen=True)
class Scored:
    """A step under the trainer's own code: per episode of the batch, one number for each trained token.

    `kl` by the run's estimator (k3 by default), `gap` = policy - sampler log-prob. `weights` says which they were.
    """

    policy: list[list[float]]
    reference: list[list[float]]
    kl: list[list[float]]
    gap: list[list[float]]
    estimator: str
    weights: str


@dataclass(frozen=True)
class Recorded:
    """A step's rollout record with its advantages: [E] episodes in the order of the batch."""

    episodes: list[Episode]
    advantages: list[float]
    model: str


@lru_cache(maxsize=8)
def _recorded(path: Path, changed: int) -> Recorded:
    from grpo.advantages import group_advantages
    from grpo.config import UsageError
    from grpo.replay import open_record

    try:
        _, record, settings = open_record(path, "cpu")
        advantages = group_advantages([group.rewards for group in record.groups], settings.loss.scale_rewards)
    except UsageError as error:
        raise Unreadable(str(error)) from error
    except (TypeError, ValueError) as error:
        raise Unreadable(f"{path}: damaged ({error})") from error
    episodes = [episode for group in record.groups for episode in group.episodes]
    return Recorded(episodes, [a for group in advantages for a in group], settings.model.model)


def recorded(run: Run, step: int) -> Recorded:
    """The tokens of a step. Raises Unreadable where they were not kept, or are damaged."""
    if step not in run.recorded:
        kept = f"here: steps {run.recorded[0]} to {run.recorded[-1]}" if run.recorded else "here: none"
        what = f"The tokens of step {step} were not kept"
        raise Unreadable(f"{what}. A run keeps those since its oldest checkpoint; {kept}.")
    import_trainer()
    return as_it_is(_recorded, run.rollouts(step))


def scored(run: Run, step: int) -> Scored:
    """KL and gap of every trained token of a step; computed once. Raises Unreadable."""
    import_trainer()
    with LOADING:
        return as_it_is(_scored, run.rollouts(step))


@lru_cache(maxsize=32)
def _scored(path: Path, changed: int) -> Scored:
    import torch

    from grpo.batching import make_microbatches
    from grpo.config import UsageError
    from grpo.head import score
    from grpo.loss import kl_divergence
    from grpo.reference import Reference
    from grpo.replay import prepare

    try:
        _, record, trainer, used = prepare(path)
        episodes = [episode for group in record.groups for episode in group.episodes]
        settings, policy = trainer.config, trainer.policy
        # With beta 0 the run had no reference; how far it is from its base can be asked all the same.
        reference = trainer.reference or Reference(
            settings.model, trainer.packing, trainer.engine.max_context, policy if settings.model.lora_rank else None
        )
    except UsageError as error:
        raise Unreadable(str(error)) from error
    limit, found = settings.optim.microbatch_tokens, dict[int, torch.Tensor]()
    for batch in make_microbatches(episodes, [1.0] * len(episodes), max_tokens=limit, packing=trainer.packing):
        batch = batch.to(policy.device)
        counts = [episodes[i].num_trained for i in batch.episodes]
        found.update(zip(batch.episodes, score(policy, batch, settings.rollout.temperature)[0].split(counts)))
    ours = [found.get(i, torch.empty(0)) for i in range(len(episodes))]
    theirs = reference.logprobs(episodes, settings.rollout.temperature, settings.optim.microbatch_tokens)
    sampler = [
        torch.tensor([value for value, trained in zip(e.sampler_logprobs, e.loss_mask) if trained]) for e in episodes
    ]
    estimator = settings.loss.kl_estimator
    kl = [kl_divergence(p, r, estimator, torch.ones_like(p)) for p, r in zip(ours, theirs)]
    gap = [p - s for p, s in zip(ours, sampler)]
    lists = [[tensor.tolist() for tensor in part] for part in (ours, theirs, kl, gap)]
    return Scored(lists[0], lists[1], lists[2], lists[3], estimator, used)


def steps_to_repeat(run: Run, step: int) -> int:
    """How many steps lie between `step` and the weights before it that are on the disk."""
    import_trainer()
    from grpo import checkpoint

    done = [checkpoint.number(folder) or 0 for folder in checkpoint.finished(run.folder)]
    return step - 1 - max((number for number in done if number < step), default=0)


def is_small(run: Run) -> bool:
    """Are the run's weights so few that scoring a step takes seconds?"""
    weights = run.folder / "final" / "model.safetensors"
    return weights.is_file() and weights.stat().st_size < SMALL


@lru_cache(maxsize=4)
def decoder(run: Path, model: str) -> Callable[[int], str]:
    """The text of single ids, by the tokenizer of the run's model. Raises Unreadable."""
    import_trainer()
    from grpo.config import UsageError
    from grpo.model import load_tokenizer

    # The run's own copy first: the model may lie elsewhere, or on another machine.
    final = run / "final"
    try:
        tokenizer, _ = load_tokenizer(str(final) if (final / "tokenizer_config.json").is_file() else model)
    except UsageError as error:
        raise Unreadable(str(error)) from error
    return lru_cache(maxsize=100_000)(lambda i: tokenizer.decode([i], skip_special_tokens=False))


def episode_tokens(
    episode: Episode, advantage: float, decode: Callable[[int], str], numbers: Scored | None = None, index: int = 0
) -> list[Token]:
    """The tokens of episode number `index` of its batch: its prompt, then its completion.

    Example: prompt [1, 2], completion [5, 6, 9] with mask [1, 1, 0] gives five tokens, of which the third and fourth
    are trained and take the first and second number of each list in `numbers`.
    """
    tokens = [Token(i, decode(i), False) for i in episode.prompt_ids]
    k = 0  # of trained tokens so far
    for i, trained, sampler in zip(episode.completion_ids, episode.loss_mask, episode.sampler_logprobs):
        if not trained:
            tokens.append(Token(i, decode(i), False))
            continue
        found = {}
        if numbers is not None:
            found = {name: getattr(numbers, name)[index][k] for name in ("policy", "reference", "kl", "gap")}
        tokens.append(Token(i, decode(i), True, advantage, sampler, **found))
        k += 1
    return tokens


# -------------------------------------------------------------------------------------------------------------- colours


def largest(values: Iterable[float]) -> float:
    """The largest absolute value, 0 for none; numbers without a value left out."""
    return max((abs(value) for value in values if math.isfinite(value)), default=0.0)


def scale_of(by: str, step: Recorded, numbers: Scored | None) -> float:
    """What the strongest colour stands for: the largest value of the whole step, so that its episodes compare."""
    if by == "advantage":
        return largest(step.advantages)
    if by in SCORED and numbers is not None:
        return largest(value for values in getattr(numbers, by) for value in values)
    return 0.0


def colour(token: Token, by: str, scale: float) -> str:
    """The token's background as CSS, "" for none. By the square root of value / scale: most KLs are near 0."""
    if not token.trained:
        return ""
    if by == "mask":
        return _rgba(BLUE, STRONGEST / 2)
    value = getattr(token, by)
    if value is None or scale <= 0:
        return ""
    if not math.isfinite(value):
        return "repeating-linear-gradient(45deg, #d55e00 0 3px, transparent 3px 6px)"
    strength = STRONGEST * math.sqrt(min(1.0, abs(value) / scale))
    if by == "kl":
        return _rgba(GREEN, strength)
    return _rgba(BLUE if value > 0 else VERMILION, strength)


def _rgba(rgb: tuple[int, int, int], opacity: float) -> str:
    return f"rgba({rgb[0]},{rgb[1]},{rgb[2]},{opacity:.3f})"


def tip(token: Token) -> str:
    """All that is known of a token, a line each."""
    lines = [f"{token.text!r}  id {token.id}", "sampled: trained" if token.trained else "not sampled: never trained"]
    names = {
        "advantage": "advantage        {:+.4f}",
        "sampler": "sampler log-prob {:.6f}",
        "policy": "trainer log-prob {:.6f}",
        "reference": "base log-prob    {:.6f}",
        "kl": "KL to the base   {:.3g} nats",
        "gap": "trainer-sampler  {:+.3g} nats",
    }
    for name, form in names.items():
        if getattr(token, name) is not None:
            lines.append(form.format(getattr(token, name)))
    return "\n".join(lines)


def legend(by: str, scale: float, numbers: Scored | None) -> str:
    """What the colours mean."""
    if by == "mask":
        chips = [(_rgba(BLUE, STRONGEST / 2), "sampled by the model: trained"), ("", "prompt, user: never trained")]
    elif by == "advantage":
        chips = [(_rgba(BLUE, STRONGEST), f"+{scale:.3g}"), (_rgba(VERMILION, STRONGEST), f"−{scale:.3g}")]
    elif numbers is None:
        return ""
    elif scale == 0:
        chips = [("", "0 at every token of this step")]
    elif by == "kl":
        chips = [("", "0"), (_rgba(GREEN, STRONGEST), f"{scale:.3g} nats ({numbers.estimator})")]
    else:
        chips = [
            (_rgba(BLUE, STRONGEST), f"trainer higher, +{scale:.3g} nats"),
            (_rgba(VERMILION, STRONGEST), f"sampler higher, −{scale:.3g} nats"),
        ]
    swatches = "".join(
        f'<span class="chip"><i style="background:{back or "transparent"}"></i>{esc(text)}</span>'
        for back, text in chips
    )
    scaled = "" if by == "mask" else '<span class="faint">largest of the step, square-root scale</span>'
    weights = f'<span class="faint">weights: {esc(numbers.weights)}</span>' if numbers and by in SCORED else ""
    return f'<div class="legend">{swatches}{scaled}{weights}</div>'


def tokens_html(tokens: Sequence[Token], by: str, scale: float, prompt_length: int) -> str:
    """The episode as coloured tokens, the prompt folded away. Their numbers are in `data-tip` (demo/page.js)."""
    prompt = "".join(_span(token, by, scale) for token in tokens[:prompt_length])
    rest = "".join(_span(token, by, scale) for token in tokens[prompt_length:])
    return (
        f"<details><summary>prompt: {prompt_length} tokens, never trained</summary>"
        f'<div class="tokens">{prompt}</div></details><div class="tokens" data-by="{esc(by)}">{rest}</div>'
    )


def _span(token: Token, by: str, scale: float) -> str:
    text = esc(token.text.replace("\n", "↵\n")) or "∅"
    back = colour(token, by, scale)
    style = f' style="background:{back}"' if back else ""
    return f'<span class="tok{" trained" if token.trained else ""}" data-tip="{esc(tip(token))}"{style}>{text}</span>'
