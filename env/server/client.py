"""A typed client, after OpenEnv's pattern: asynchronous, or `.sync()`.

Example, against `python -m env.server`::

    with ClarifyClient(base_url="http://127.0.0.1:8000").sync() as session:
        first = session.reset(split="held_out", index=0)
        print(first.observation.messages[-1]["content"])
        told = session.step(ClarifyAction(text='ask_question("Which day?")'))
        print(told.observation.result)
"""

from __future__ import annotations

from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient

from env.literals import printable
from env.server.models import ClarifyAction, ClarifyObservation, ClarifyState


class ClarifyClient(EnvClient[ClarifyAction, ClarifyObservation, ClarifyState]):
    """One session with a server: `reset` (the options of `ClarifyEnvironment.reset`), `step`, `state`, `close`.

    Raises ConnectionError, TimeoutError, websockets' ConnectionClosed; RuntimeError with what the server objects to.
    """

    def _step_payload(self, action: ClarifyAction) -> dict[str, Any]:
        payload = action.model_dump(mode="json", exclude_defaults=True)
        # JSON on the wire is UTF-8, which has no half surrogate pairs.
        return payload | {"text": printable(action.text)} if action.text else payload

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[ClarifyObservation]:
        reward, done = payload.get("reward"), payload["done"]
        observation = ClarifyObservation(**payload["observation"], reward=reward, done=done)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> ClarifyState:
        return ClarifyState(**payload)
