"""Where episodes are played: in this process, or on a server (`--env-url`)."""

from __future__ import annotations

from collections.abc import Callable

from env.clarify import ClarifyEnv
from env.server import INSTALL
from grpo.config import Config, UsageError
from scenarios.schema import Scenario


def environment(url: str | None, sessions: int = 1) -> Callable[[Scenario], ClarifyEnv]:
    """What makes an episode's environment: the class itself, or, with a URL, one with the same members on that server.

    Args:
        sessions: the most episodes at once; a server that takes on fewer would lose the rest.

    Raises UsageError where the server cannot be used.
    """
    if not url:
        return ClarifyEnv
    try:
        from env.server.remote import RemoteEnvs
    except ModuleNotFoundError as error:
        package = (error.name or "openenv").split(".")[0]
        raise UsageError(f"--env-url: the package {package} is missing: {INSTALL}") from None
    try:
        return RemoteEnvs(url).check(sessions)
    except ValueError as error:
        raise UsageError(f"--env-url {url}: {error}") from None


def sessions_needed(settings: Config) -> int:
    """The most episodes that a run plays at once: those of a step, or of an evaluation."""
    return max(settings.rollout.prompts_per_step * settings.rollout.num_generations, settings.eval.eval_limit)
