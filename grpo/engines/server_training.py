"""Rollouts from vLLM servers while training: they sample with the trainer's weights, which they get after each update.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out \\
        --worker-extension-cls grpo.engines.server_worker.WeightReceiver
    python train.py --model MODEL --vllm-url http://a:8000 http://b:8000

What `vllm_engine` is for a vLLM in the trainer's process this is for others, in the same order:

    stop sampling, load every tensor once, compare checksums, name the new weights, forget cached prefixes, go on,
    compare log-probs of a fixed text (`vllm_sync`)

A turn is a request to `/inference/v1/generate`, token ids in and token ids out. vLLM says of each answer which weights
sampled it, by the name that they got; an answer from others (a server that was restarted, or that somebody else has
changed) ends the run. A group's episodes all go to one server, whose prefix cache has their prompt then; which one is
decided by the group's number in the step, not by the process that plays it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo import distributed
from grpo.chat import ChatTokens
from grpo.config import RunStopped, UsageError
from grpo.console import counted
from grpo.data_types import Episode
from grpo.endpoint import Server, ServerError
from grpo.engines import TurnOutput, TurnRequest
from grpo.engines.server_engine import ServerEngine, check_answers, find_model, turn_parameters
from grpo.engines.server_weights import SCALE_OUT, START, WeightSender, describe, without
from grpo.engines.vllm_sync import compare
from grpo.model import Policy, source_of
from grpo.sampling import SamplingConfig, random_stream

GENERATE = "/inference/v1/generate"
CANARY_LENGTH = 300  # tokens at most: above two blocks of a prefix cache, which have 128 tokens on a CPU


Scored = tuple[list[int], list[float], list[str]]  # canary with one more token, its log-probs, tensors that differ


@dataclass(frozen=True)
class Served:
    """A server, the name under which it has the model, and over how many workers."""

    server: Server
    model: str
    workers: int


class TrainingServers(ServerEngine):
    """Implements `grpo.engines.Engine` on servers that sample with the policy's weights; see the module's text. Made by
    `connect`.

    Args:
        served: the servers.
        sender: in the first process of the run, for all of them; None in the others.
        policy: whose weights to sample with.
        canary: ids of a text on which both sides must agree; the first 300 are used.
        options: for `ServerEngine`; `concurrency` is that of this process, over all servers.

    `step` and `wake` raise RunStopped where a server is gone or has other weights.
    """

    def __init__(
        self,
        served: Sequence[Served],
        sender: WeightSender | None,
        policy: Policy,
        canary: Sequence[int],
        eos_ids: Collection[int],
        max_context: int,
        **options: Any,
    ):
        super().__init__(served[0].server, served[0].model, eos_ids, max_context, **options)
        self.served, self.sender, self.policy = served, sender, policy
        self.canary = tuple(canary)[: min(CANARY_LENGTH, max_context - 1)]  # one more is sampled
        self._stale, self._updates, self._weights = True, 0, ""

    @property
    def description(self) -> str:
        """For the run's header."""
        workers = counted(sum(each.workers for each in self.served), "worker")
        urls = ", ".join(each.server.url for each in self.served)
        return f"vllm serve at {urls} ({workers}), contexts of {self.max_context} tokens"

    # ------------------------------------------------------------------------------------------------------ weights

    def weights_changed(self) -> None:
        """The trainer's weights are no longer those that the servers have."""
        self._stale = True

    def wake(self) -> None:
        """Ready to sample with the trainer's present weights; does nothing where that is so already. In all processes
        at the same time.

        Raises:
            RunStopped: a server cannot be reached, or does not have the trainer's weights afterwards.
        """
        self.update()

    def update(self, at_start: bool = False) -> None:
        """What `wake` does; `at_start`, where nothing has been written yet, a UsageError is raised instead."""
        if self._stale:
            self._updates += 1
            self._weights, found = distributed.first(self._send, at_start)
            # In all processes, as the forward of a sharded model must not differ between them.
            distributed.agreed(self._compare, found, at_start)
            self._stale = False

    def sleep(self) -> None:
        """Nothing to do: the servers have devices of their own."""

    def start(self, step: int, sampling: SamplingConfig | None = None, before: Sequence[Episode] = ()) -> None:
        """Begin a batch, with the trainer's present weights."""
        super().start(step, sampling, before)
        self.wake()

    def _send(self, at_start: bool) -> tuple[str, list[Scored]]:
        """Give all servers the policy's weights; the name that they have there, and what each makes of the canary."""
        assert self.sender
        name = f"{self.sender.trainer}-{self._updates}"
        try:
            return name, self._replace_weights(self.sender, name)
        except ServerError as error:
            if at_start:
                raise UsageError(str(error)) from error
            raise _stopped(error) from error

    def _replace_weights(self, sender: WeightSender, name: str) -> list[Scored]:
        for each in self.served:
            each.server.command("/pause?mode=abort")
        sender.load(self.policy.model)
        differing = sender.differing(self.policy.model)
        for each in self.served:
            each.server.command("/update_weight_version", {"new_version": name})
            self.forget_prefixes(each.server)
            each.server.command("/resume")
        return [(*self._canary_logprobs(each), wrong) for each, wrong in zip(self.served, differing, strict=True)]

    def _compare(self, found: Sequence[Scored], at_start: bool) -> None:
        try:
            for each, (ids, logprobs, wrong) in zip(self.served, found, strict=True):
                compare(self.policy, ids, logprobs, wrong, f"--vllm-url {each.server.url}:")
        except RunStopped as error:
            raise (UsageError(str(error)) if at_start else error) from None

    def forget_prefixes(self, server: Server) -> None:
        """No key or value that was computed before is read again. Raises ServerError where the server refuses."""
        if server.command("/reset_prefix_cache").get("success") is not True:
            raise server.error("its prefix cache could not be reset: requests are still running there")

    def _canary_logprobs(self, served: Served) -> tuple[list[int], list[float]]:
        """The canary with one more token, sampled greedily, and the server's log-probs of all but the first.

        Two requests. The one that samples reads cached prefixes where there are any, so that a forgotten reset shows;
        the one that scores the canary itself never does.
        """
        greedy, server = SamplingConfig(temperature=0.0), served.server
        body = generate_body(served.model, self.canary, 1, greedy, 0, ())
        ids, logprobs, _ = read_generated(server, server.post(GENERATE, body))
        body["sampling_params"]["prompt_logprobs"] = 0
        found: Any = server.post(GENERATE, body).get("prompt_logprobs")
        try:
            scores = [entry[str(token)]["logprob"] for token, entry in zip(self.canary[1:], found[1:], strict=True)]
        except (TypeError, KeyError, ValueError):
            raise server.error("returns no log-probs of a prompt (`prompt_logprobs`); vLLM 0.32 does") from None
        return [*self.canary, *ids], [*scores, *logprobs]

    # --------------------------------------------------------------------------------------------------------- turns

    def step(self) -> list[TurnOutput]:
        """Wait until a turn ends; return all that have ended by then."""
        try:
            return super().step()
        except ServerError as error:
            raise _stopped(error) from error

    def _complete(self, request: TurnRequest, body: dict[str, Any]) -> TurnOutput:
        server = self._served(request).server
        answer = server.post(GENERATE, body)
        ids, logprobs, reason = read_generated(server, answer)
        output = self._checked(server, request, ids, logprobs, reason)
        if (weights := weights_of(server, answer)) != {self._weights}:
            raise server.error(
                f"sampled with other weights ({', '.join(sorted(weights))}) than it was sent ({self._weights}): it was "
                "restarted, or somebody else has changed them"
            )
        return output

    def _body(self, request: TurnRequest) -> dict[str, Any]:
        stream = random_stream(self._seed, self._step, *request.key, request.turn)
        model = self._served(request).model
        return generate_body(
            model, request.prompt_ids, request.max_tokens, self.sampling, int(stream[0] >> 1), self.eos_ids
        )

    def _served(self, request: TurnRequest) -> Served:
        return self.served[request.group % len(self.served)]


def connect(
    urls: Sequence[str],
    policy: Policy,
    chat: ChatTokens,
    first_prompts: Sequence[tuple[int, ...]],
    max_context: int,
    sampling: SamplingConfig,
    **options: Any,
) -> TrainingServers:
    """Find the servers, make sure that they can be trained with, and send them the policy's weights.

    Args:
        urls: of the servers.
        policy: with whole weights.
        first_prompts: of the episodes to come.
        max_context: most tokens of an episode.
        sampling: of the rollouts.
        options: for `ServerEngine`.

    Raises:
        UsageError: a server cannot be reached, serves another model, was not started for training, or is the sampler of
            another run; or it does not have the policy's weights although it was sent them.
    """
    servers = [
        Server(url, connections=options.get("concurrency", 64), advice=f"start it with `{START}`") for url in urls
    ]
    prompt, canary = min(first_prompts, key=len), max(first_prompts, key=len)
    sender: WeightSender | None = None

    def meet() -> list[tuple[str, int]]:
        nonlocal sender
        models = [find_model(server, policy.name, source_of(policy.name)) for server in servers]
        about = [describe(server) for server in servers]
        for server, each, (_, context) in zip(servers, about, models):
            check(server, each, context, str(policy.dtype).removeprefix("torch."), max_context, sampling)
        sender = WeightSender(servers, about)
        for server, (card, _) in zip(servers, models):
            server.command("/resume")  # a run that was killed while it sent weights has left it paused
            check_answers(server, card["id"], chat, prompt)
            check_generates(server, card["id"], prompt)
        sender.join()
        return [(card["id"], each["workers"]) for (card, _), each in zip(models, about)]

    try:
        served = [Served(server, *each) for server, each in zip(servers, distributed.first(meet), strict=True)]
        engine = TrainingServers(
            served, sender, policy, canary, chat.eos_ids, max_context, sampling=sampling, **options
        )
        engine.update(at_start=True)
    except UsageError:
        if sender is not None:
            sender.close()
        raise
    return engine


def check(
    server: Server, about: Mapping[str, Any], context: int, dtype: str, max_context: int, sampling: SamplingConfig
) -> None:
    """Raises UsageError where a server, as it was started, cannot be trained with: the line says the flag."""
    if context < max_context:
        raise server.error(
            f"its context of {context} tokens is shorter than episodes may be; start it with --max-model-len "
            f"{max_context}, or train with a lower --max-completion-len"
        )
    if about["replicas"] > 1:
        raise server.error("--data-parallel-size: start a server for each replica, and give all their addresses")
    if about["quantization"]:
        raise server.error(f"its weights are quantized ({about['quantization']}); start it without --quantization")
    if about["dtype"] != dtype:
        raise server.error(f"computes in {about['dtype']}, training in {dtype}; start it with --dtype {dtype}")
    scaled = (sampling.temperature, sampling.top_p) != (1.0, 1.0)
    if scaled and about["logprobs_mode"] != "processed_logprobs":
        raise server.error(
            f"returns log-probs at temperature 1, and rollouts have --temperature {sampling.temperature:g} --top-p "
            f"{sampling.top_p:g}; start it with --logprobs-mode processed_logprobs"
        )


def check_generates(server: Server, model: str, prompt: Sequence[int]) -> None:
    """One token by the route that the rollouts take. Raises UsageError."""
    try:
        answer = server.post(GENERATE, generate_body(model, prompt, 1, SamplingConfig(temperature=0.0), 0, ()))
    except ServerError as error:
        raise without(server, SCALE_OUT) if error.status in (403, 404) else error from None
    read_generated(server, answer)
    weights_of(server, answer)


def generate_body(
    model: str, prompt: Sequence[int], max_tokens: int, sampling: SamplingConfig, seed: int, eos_ids: Collection[int]
) -> dict[str, Any]:
    """A request for one turn. Of the sampling parameters that it leaves out none has a default that does anything."""
    return {
        "model": model,
        "token_ids": list(prompt),
        "sampling_params": turn_parameters(max_tokens, sampling, seed, eos_ids) | {"detokenize": False},
    }


def read_generated(server: Server, answer: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...], Any]:
    """Token ids, log-probs and finish reason of an answer's only choice."""
    try:
        (choice,) = answer["choices"]
        ids = tuple(choice["token_ids"])
        logprobs = tuple(
            float({one["token_id"]: one["logprob"] for one in [entry, *entry.get("top_logprobs", ())]}[token])
            for token, entry in zip(ids, choice["logprobs"]["content"], strict=True)
        )
        if not all(isinstance(token, int) for token in ids) or not all(map(math.isfinite, logprobs)):
            raise ValueError
    except (KeyError, ValueError, TypeError, AttributeError):
        raise server.error(f"{GENERATE} was answered with no ids and log-probs: {str(dict(answer))[:100]}") from None
    return ids, logprobs, choice.get("finish_reason")


def weights_of(server: Server, answer: Mapping[str, Any]) -> set[str]:
    """Names of the weights that sampled an answer's tokens."""
    try:
        return {str(span["version"]) for span in answer["choices"][0]["weight_versions"]}
    except (KeyError, TypeError):
        raise server.error("does not say which weights it samples with (`weight_versions`); vLLM 0.32 does") from None


def _stopped(error: ServerError) -> RunStopped:
    return RunStopped(f"{error}; when its servers are there again, `python train.py --resume RUN` goes on")
