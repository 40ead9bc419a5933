"""The trainer's side of weights on vLLM servers: who may have them, and how they get there.

    describe     what the server is: types, log-probs, how many workers
    meet, join   the workers find the trainer's store and open a channel (`weight_channel`)
    load         after each update: every weight once, to all servers at the same time
    compare      the checksum of every tensor

Each is a method of `server_worker.WeightReceiver`, called at `/collective_rpc`, a route that `vllm serve` has in its
development mode. A run has one sender, in its first process.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from urllib3.util import parse_url

from grpo.endpoint import InFlight, Server, ServerError
from grpo.engines.vllm_tensors import checksum, named_weights
from grpo.engines.weight_channel import LOST, Channel, make_store, own_address

EXTENSION = "--worker-extension-cls grpo.engines.server_worker.WeightReceiver"
SCALE_OUT = "--enable-scale-out"  # the route that says which weights sampled
START = f"VLLM_SERVER_DEV_MODE=1 vllm serve MODEL {SCALE_OUT} {EXTENSION}"


def call(server: Server, method: str, *args: Any) -> list[dict[str, Any]]:
    """What each worker of a server answers. Raises ServerError where one could not do it."""
    answer = server.command("/collective_rpc", {"method": f"grpo_{method}", "args": args})
    results = answer.get("results")
    if not isinstance(results, list) or not all(isinstance(result, dict) for result in results) or not results:
        raise server.error(f"{method} was answered with {str(answer)[:100]}")
    if errors := [str(result["error"]) for result in results if "error" in result]:
        raise server.error(f"{method}: a worker there says: {min(errors, key=lambda error: error == LOST)}")
    return results


def describe(server: Server) -> dict[str, Any]:
    """What `WeightReceiver.grpo_describe` says. Raises UsageError where the server was not started for training."""
    try:
        return call(server, "describe")[0]
    except ServerError as error:
        if error.status is None:
            raise
        raise without(server, "VLLM_SERVER_DEV_MODE=1" if error.status == 404 else EXTENSION) from error


def without(server: Server, missing: str) -> ServerError:
    """To be raised: the server lacks what it has to be started with."""
    return server.error(f"was started without {missing}, which training needs: {START}")


class WeightSender:
    """Sends a model's weights to vLLM servers.

    Args:
        servers: all different.
        about: what `describe` said of each.

    Raises:
        UsageError: a server is the sampler of another run that goes on, or is there twice.
    """

    def __init__(self, servers: Sequence[Server], about: Sequence[Mapping[str, Any]]):
        self.servers, self.about = servers, about
        self.trainer = secrets.token_hex(4)
        self._store: Any = make_store()
        self._channels: list[Channel] = []
        self._places = [(_own_address(server), self._store.port) for server in servers]
        for server, place in zip(servers, self._places):
            for answer in call(server, "meet", self.trainer, *place):
                if answer.get("busy") == self.trainer:
                    raise server.error("is the same server as another one; give each address once")
                if "busy" in answer:
                    raise server.error("is the sampler of another training run that goes on; a server has one trainer")

    def join(self) -> None:
        """Open the channels. Raises ServerError."""
        for index, (server, place) in enumerate(zip(self.servers, self._places)):
            name, size = f"server-{index}", self.about[index]["workers"] + 1
            calls = InFlight(1)
            calls.submit(index, partial(call, server, "join", self.trainer, name, *place))
            try:
                self._channels.append(Channel(self._store, name, 0, size, place[0]))
            except RuntimeError as error:
                _settle(calls)
                raise server.error(f"its workers do not reach {place[0]}, where training runs, or it them") from error
            _settle(calls)

    def close(self) -> None:
        """Leave the servers to another trainer. The end of the process does so, too."""
        self._channels.clear()
        self._store = None

    def load(self, model: torch.nn.Module) -> None:
        """Every weight once, to all servers, each in the widest type that it has. Raises ServerError."""
        names, shapes = _names_and_shapes(named_weights(model))
        types = [getattr(torch, each["widest"]) for each in self.about]
        commands = [("load", names, shapes, each["widest"]) for each in self.about]
        tensors = ({dtype: weight.to(dtype).cpu() for dtype in set(types)} for _, weight in named_weights(model))
        self._stream(commands, ([each[dtype] for dtype in types] for each in tensors))

    def differing(self, model: torch.nn.Module) -> list[list[str]]:
        """Of each server, the names of its tensors that have another checksum than the trainer's; none of one in whose
        workers are parts of tensors only. Raises ServerError."""
        names, shapes = _names_and_shapes(named_weights(model, tied_twice=True))
        types = [getattr(torch, each["dtype"]) for each in self.about]
        commands = [("compare", names, shapes)] * len(self.servers)
        sums = (
            {dtype: checksum(weight, dtype).cpu() for dtype in set(types)}
            for _, weight in named_weights(model, tied_twice=True)
        )
        answers = self._stream(commands, ([each[dtype] for dtype in types] for each in sums))
        return [[] if len(answer) > 1 else answer[0]["differ"] for answer in answers]

    def _stream(
        self, commands: Sequence[tuple[Any, ...]], tensors: Iterable[Sequence[torch.Tensor]]
    ) -> list[list[dict[str, Any]]]:
        """Call a method in the workers of each server, which receive of each of `tensors` the one of their server."""
        calls = InFlight(len(self.servers))
        for index, (server, (method, *args)) in enumerate(zip(self.servers, commands, strict=True)):
            calls.submit(index, partial(call, server, method, self.trainer, *args))
        lost = False
        for each in tensors:
            try:
                self._hand_over(each)
            except RuntimeError:  # a server has its reason, or is gone
                lost = True
            if lost:
                self._channels.clear()  # so that nobody there waits for the rest; nothing else may hold them
                break
        answers = _settle(calls)
        if lost:
            raise self.servers[0].error("the connection to its workers, or to those of another server, broke")
        return [answers[index] for index in range(len(self.servers))]

    def _hand_over(self, tensors: Sequence[torch.Tensor]) -> None:
        for work in [channel.send(tensor) for channel, tensor in zip(self._channels, tensors, strict=True)]:
            work.wait()


def _settle(calls: InFlight) -> dict[Hashable, Any]:
    """Wait for all answers. Of errors among them the first one is raised that is a reason, at the end."""
    answers: dict[Hashable, Any] = {}
    errors = []
    while ended := calls.ended():
        for key, answer in ended:
            if isinstance(answer, Exception):
                errors.append(answer)
            answers[key] = answer
    if errors:
        raise min(errors, key=lambda error: LOST in str(error))
    return answers


def _names_and_shapes(weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[str], list[list[int]]]:
    pairs = [(name, list(weight.shape)) for name, weight in weights]
    return [name for name, _ in pairs], [shape for _, shape in pairs]


def _own_address(server: Server) -> str:
    """Where this server's machine finds us."""
    parsed = parse_url(server.url)
    return own_address(str(parsed.host).strip("[]"), parsed.port or (443 if parsed.scheme == "https" else 80))
