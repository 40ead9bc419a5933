"""Where episodes are played: in this process, or on a server (`--env-url`)."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from env.clarify import ClarifyEnv, EnvFactory
from env.server import INSTALL
from grpo.config import Config, RunStopped, UsageError
from scenarios.schema import Scenario

if TYPE_CHECKING:
    from env.server.remote import RemoteEnv, RemoteEnvs

WAIT_SECONDS = 60.0
"""How long a rollout batch waits for its server to come back before the run ends."""


class ServedEnvironment:
    """Makes environments on a server, and waits for it where it is gone.

    An episode whose session breaks is lost. Were the next batches played nevertheless, a server that restarts would
    cost a run all its steps, each lost within a moment.
    """

    def __init__(self, envs: RemoteEnvs, sessions: int):
        self.envs, self.sessions = envs, sessions

    def __call__(self, scenario: Scenario) -> RemoteEnv:
        return self.envs(scenario)

    def ready(self) -> None:
        """Before a batch of episodes. Raises RunStopped where the server does not come back in time."""
        deadline, told = time.monotonic() + WAIT_SECONDS, False
        while True:
            try:
                self.envs.check(self.sessions)
                return
            except ValueError as error:
                if time.monotonic() >= deadline:
                    raise RunStopped(f"--env-url {self.envs.url}: {error}; a run goes on with --resume") from None
                if not told:
                    print(f"waiting up to {WAIT_SECONDS:g} s for {self.envs.url}: {error}", file=sys.stderr, flush=True)
                told = True
                time.sleep(min(1.0, WAIT_SECONDS / 10))


def environment(url: str | None, sessions: int = 1) -> EnvFactory:
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
        return ServedEnvironment(RemoteEnvs(url).check(sessions), sessions)
    except ValueError as error:
        raise UsageError(f"--env-url {url}: {error}") from None


def sessions_needed(settings: Config) -> int:
    """The most episodes that a run plays at once: those of a step, or of an evaluation."""
    return max(settings.rollout.prompts_per_step * settings.rollout.num_generations, settings.eval.eval_limit)
