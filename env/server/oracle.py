"""Play tasks with knowledge of what is hidden: `python -m env.server.oracle --url http://127.0.0.1:8000`.

The highest reward there is, 1, is that of the right plan without a question. Where the oracle does not get it, the
server scores otherwise than this version of the environment, or its tasks are others.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import TYPE_CHECKING

from env.server import INSTALL
from env.tools import format_call
from scenarios.schema import Scenario

if TYPE_CHECKING:
    from env.server.client import ClarifyClient
    from env.server.remote import RemoteEnvs


def oracle_turn(scenario: Scenario) -> str:
    """The turn that earns the most: the hidden profile as the plan."""
    return format_call("propose_plan", {"plan": scenario.hidden_profile})


def main(args: list[str] | None = None) -> int:
    """Returns the exit code: 0, 1 where a task did not give the maximum, 2 where none could be played."""
    parser = argparse.ArgumentParser(prog="python -m env.server.oracle", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: http://127.0.0.1:8000")
    parser.add_argument("--tasks", type=int, default=50, help="of each split; default: 50")
    options = parser.parse_args(args)
    if importlib.util.find_spec("openenv") is None:
        print(f"env.server.oracle: the package openenv is missing: {INSTALL}", file=sys.stderr)
        return 2
    from env.server.remote import RemoteEnvs

    try:
        rewards = play(RemoteEnvs(options.url).check(), options.tasks)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"env.server.oracle: --url {options.url}: {error}", file=sys.stderr)
        return 2
    best = sum(reward >= 1.0 - 1e-9 for reward in rewards)
    print(f"{best} of {len(rewards)} tasks gave the maximum")
    return 0 if best == len(rewards) else 1


def play(envs: RemoteEnvs, number: int) -> list[float]:
    """Rewards of the first tasks of each split, as the server gives them."""
    from env.server import tasks
    from env.server.models import ClarifyAction

    async def episode(session: ClarifyClient, split: str, index: int) -> float:
        await session.reset(split=split, index=index)
        return (await session.step(ClarifyAction(text=oracle_turn(tasks.scenario_of(split, index))))).reward

    session = envs.take()
    chosen = [(split, index) for split in tasks.SPLITS for index in range(min(number, tasks.num_tasks(split)))]
    return [envs.run(episode(session, split, index)) for split, index in chosen]


if __name__ == "__main__":
    sys.exit(main())
