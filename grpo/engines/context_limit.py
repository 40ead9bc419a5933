"""How long an episode can be in the in-process sampler: what a model's configuration says of its attention."""

from __future__ import annotations

from typing import Any

from grpo.config import UsageError


def checked_context(model: Any, wanted: int | None) -> int:
    """The most tokens an episode can have: `wanted`, or all the model takes. UsageError where it cannot run here."""
    config, name = model.config.get_text_config(), type(model).__name__
    kinds = getattr(config, "layer_types", None) or ["full_attention", "sliding_attention"]
    strange = sorted(set(kinds) - {"full_attention", "sliding_attention", "chunked_attention"})
    if strange or getattr(model, "_is_stateful", False):
        raise UsageError(f"--engine torch: {name} has layers that are not attention ({', '.join(strange) or 'state'})")
    stated: dict[str, int | None] = {"max_position_embeddings": getattr(config, "max_position_embeddings", None)}
    if "sliding_attention" in kinds:
        stated["sliding_window"] = getattr(config, "sliding_window", None)
    if "chunked_attention" in kinds:
        stated["attention_chunk_size"] = getattr(config, "attention_chunk_size", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        # Beyond this length such models choose other frequencies, for the whole batch at once.
        stated["original_max_position_embeddings"] = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
    limits = {option: limit for option, limit in stated.items() if limit}
    if wanted is None:
        if not limits:
            raise UsageError(f"--engine torch: {name} does not say how long its context is")
        return min(limits.values())
    for option, limit in limits.items():
        if limit < wanted:
            raise UsageError(f"--engine torch: a context of {wanted} tokens exceeds {option} {limit} of {name}")
    return wanted
