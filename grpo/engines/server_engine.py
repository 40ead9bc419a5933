"""A served model as an engine, for evaluation: OpenAI-compatible completions, token ids in and token ids out.

    vllm serve MODEL
    python eval.py --model MODEL --vllm-url http://localhost:8000

A turn is one request. Many are in flight at once, each in a thread of its own, so an episode whose turn has ended is
answered while the others are still being sampled; the server batches them. Its prefix cache recognises an episode's
earlier turns. Each request says all of how to sample: what a model folder's generation config or the server's flags
would choose (top_k, penalties, further stop ids) changes nothing.

It cannot train. The weights are the server's, and its log-probs need not be those of the distribution that was sampled
from: `vllm serve` gives those at temperature 1 unless told otherwise (`--logprobs-mode`). For training there is
`server_training`, which builds on it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from grpo.chat import ChatTokens
from grpo.data_types import Episode
from grpo.endpoint import InFlight, Server
from grpo.engines import Key, TurnOutput, TurnRequest
from grpo.sampling import SamplingConfig, random_stream

MIN_TEMPERATURE = 0.01  # vLLM raises lower ones to this without a word

# Reasons for the end of a turn, as servers say them.
FINISHES: dict[str, Literal["stop", "length"]] = {"stop": "stop", "length": "length"}


class ServerEngine:
    """Implements `grpo.engines.Engine` on a server's completions; see the module's text. Made by `connect`.

    A turn's seed is a hash of (seed, step, scenario, member, turn): members differ, and a rerun repeats them as far as
    the server does, whose rounding may depend on what else it computes at the time.

    Args:
        server: where to ask.
        model: name under which it serves the model.
        eos_ids: ids that end a turn; no others do.
        max_context: most tokens of an episode.
        concurrency: requests in flight at most; more episodes than that wait in line.
        seed: for sampling configs without one.
        sampling: temperature and top-p unless `start` says otherwise.

    Log-probs are what the server gives. `step` waits until a turn ends; it raises the UsageError of a request that
    failed for good, and the batch is lost then.
    """

    def __init__(
        self,
        server: Server,
        model: str,
        eos_ids: Collection[int],
        max_context: int,
        concurrency: int = 64,
        seed: int = 0,
        sampling: SamplingConfig | None = None,
    ):
        self.server, self.model, self.eos_ids = server, model, frozenset(eos_ids)
        self.max_context, self.concurrency, self.seed = max_context, concurrency, seed
        self.default_sampling = sampling or SamplingConfig()
        self.about = {"model": model, "max_context": max_context}
        """What a report should say of the server, JSON types."""
        self._begin(0, None)

    @property
    def description(self) -> str:
        """For people."""
        return f"{self.model} served by {self.server.url}, {self.max_context} tokens of context; for evaluation only"

    def wake(self) -> None:
        """Nothing to do: whoever started the server has it ready."""

    sleep = wake

    def weights_changed(self) -> None:
        """Raises UsageError: what the trainer has changed cannot get there."""
        raise self.server.error("a server is for evaluation only: its weights cannot be replaced from here")

    def start(self, step: int, sampling: SamplingConfig | None = None, before: Sequence[Episode] = ()) -> None:
        """Begin a batch. What is still in flight of an older one is forgotten: its answers go to a queue of its own."""
        self._begin(step, sampling)

    def _begin(self, step: int, sampling: SamplingConfig | None) -> None:
        self._step, self.sampling = step, sampling or self.default_sampling
        if 0 < self.sampling.temperature < MIN_TEMPERATURE:
            given = f"temperature {self.sampling.temperature:g}"
            raise self.server.error(f"{given} would be raised by vLLM; give 0 or at least {MIN_TEMPERATURE:g}")
        self._seed = self.seed if self.sampling.seed is None else self.sampling.seed
        self._episodes: dict[Key, bool] = {}  # live ones -> whether a turn of theirs is being sampled
        self._calls = InFlight(self.concurrency)

    @property
    def num_active(self) -> int:
        """Episodes that have begun and are not released."""
        return len(self._episodes)

    def submit(self, request: TurnRequest) -> None:
        """Send a turn, or queue it. ValueError if it is empty, cannot fit, or the episode's last one has not ended."""
        request.check(self.max_context)
        if self._episodes.get(request.key):
            raise ValueError(f"turn {request.turn} of episode {request.key}: its previous turn is still being sampled")
        self._episodes[request.key] = True
        self._calls.submit(request.key, partial(self._complete, request, self._body(request)))

    def step(self) -> list[TurnOutput]:
        """Wait until a turn ends; return all that have ended by then."""
        outputs: list[TurnOutput] = []
        while not outputs and (ended := self._calls.ended()):
            for key, answer in ended:
                if isinstance(answer, Exception):
                    raise answer
                if key in self._episodes:  # else released meanwhile
                    self._episodes[key] = False
                    outputs.append(answer)
        return outputs

    def release(self, key: Key) -> None:
        """The episode is over. A turn of it that still waits is not sent any more."""
        self._episodes.pop(key, None)
        self._calls.cancel(key)

    def _complete(self, request: TurnRequest, body: dict[str, Any]) -> TurnOutput:
        answer = self.server.post("/v1/completions", body)
        return self._checked(self.server, request, *read_choice(self.server, answer))

    def _body(self, request: TurnRequest) -> dict[str, Any]:
        stream = random_stream(self._seed, self._step, *request.key, request.turn)
        return completion_body(
            self.model, list(request.prompt_ids), request.max_tokens, self.sampling, int(stream[0] >> 1), self.eos_ids
        )

    def _checked(
        self, server: Server, request: TurnRequest, ids: tuple[int, ...], logprobs: tuple[float, ...], reason: Any
    ) -> TurnOutput:
        if not 0 < len(ids) <= request.max_tokens:
            raise server.error(f"{len(ids)} tokens came back where 1 to {request.max_tokens} were asked for")
        if reason == "stop" and ids[-1] not in self.eos_ids:
            raise server.error(f"a turn ended with token {ids[-1]}, which ends no turn of --model")
        if reason not in FINISHES:
            raise server.error(f"a turn ended for the reason {reason!r}")
        return TurnOutput(request.key, ids, logprobs, FINISHES[reason])


def connect(
    url: str,
    name: str,
    source: str | Path,
    chat: ChatTokens,
    first_prompts: Collection[tuple[int, ...]],
    **options: Any,
) -> ServerEngine:
    """Find the model at `url`, and make sure that it is the one whose tokenizer we have.

    Args:
        name: the model as the user calls it (`--model`).
        source: its folder or hub id; the server must serve a model of either name.
        first_prompts: of the episodes to come; the context must hold the longest.
        options: for `ServerEngine`.

    Raises:
        UsageError: it cannot be reached, serves another model or another vocabulary, returns no token ids or log-probs,
            or its context is too short.
    """
    server = Server(url, connections=options.get("concurrency", 64))
    card, context = find_model(server, name, source)
    longest = max(map(len, first_prompts), default=1)
    if context <= longest:
        raise server.error(
            f"its context of {context} tokens (--max-model-len) is too short for first prompts of {longest}"
        )
    check_answers(server, card["id"], chat, min(first_prompts, key=len, default=()))
    return ServerEngine(server, card["id"], chat.eos_ids, context, **options)


def find_model(server: Server, name: str, source: str | Path) -> tuple[dict[str, Any], int]:
    """What the server says of the model, and its context in tokens."""
    cards = server.get("/v1/models").get("data")
    if not isinstance(cards, list) or not all(isinstance(card, dict) and card.get("id") for card in cards):
        raise server.error("lists no models at /v1/models; is it an OpenAI-compatible server?")
    card = next((card for card in cards if _names(card) & {name, _path(name), str(source), _path(source)}), None)
    if card is None:
        served = ", ".join(card["id"] for card in cards) or "nothing"
        raise server.error(
            f"serves {served}, not --model {name}; give --model the served folder, or start the server with "
            f"--served-model-name {name}"
        )
    # An adapter has the context of the model it belongs to.
    related = [card, *(other for other in cards if other["id"] == card.get("parent"))]
    context = next((each["max_model_len"] for each in related if isinstance(each.get("max_model_len"), int)), None)
    if context is None:
        raise server.error("does not say how long its context is (max_model_len); vLLM does")
    return card, context


def check_answers(server: Server, model: str, chat: ChatTokens, prompt_ids: tuple[int, ...]) -> None:
    """One token after a prompt sent as text: the server must read the text as the ids that we read."""
    text = chat.tokenizer.decode(prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    expected = chat.tokenizer.encode(text, add_special_tokens=False)
    body = completion_body(model, text, 1, SamplingConfig(temperature=0.0), 0, chat.eos_ids)
    answer = server.post("/v1/completions", body | {"add_special_tokens": False})
    read_choice(server, answer)
    found = answer["choices"][0].get("prompt_token_ids")
    if found != expected:
        raise server.error(f"{model} has another tokenizer than --model: the same text is other ids there")


def completion_body(
    model: str, prompt: str | list[int], max_tokens: int, sampling: SamplingConfig, seed: int, eos_ids: Collection[int]
) -> dict[str, Any]:
    """A request that leaves nothing to defaults, as those come from the model's generation config or server flags."""
    return {
        "model": model,
        "prompt": prompt,
        **turn_parameters(max_tokens, sampling, seed, eos_ids),
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": 1,
        "return_token_ids": True,
    }


def turn_parameters(max_tokens: int, sampling: SamplingConfig, seed: int, eos_ids: Collection[int]) -> dict[str, Any]:
    """How a turn is sampled and where it ends, under vLLM's names."""
    return {
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p if sampling.temperature else 1.0,
        "seed": seed,
        "top_k": 0,
        "min_p": 0.0,
        "ignore_eos": True,  # the server's idea of it; ours follows
        "stop_token_ids": sorted(eos_ids),
        "logprobs": 0,  # of the sampled token alone
    }


def read_choice(server: Server, answer: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...], Any]:
    """Token ids, log-probs and finish reason of an answer's only choice."""
    try:
        (choice,) = answer["choices"]
        ids, found = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    except (KeyError, ValueError, TypeError, AttributeError):
        raise server.error(f"a completion is not as the OpenAI API has it: {str(dict(answer))[:100]}") from None
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise server.error("returns no token ids (`return_token_ids`); vLLM 0.32 does")
    finite = isinstance(found, list) and all(isinstance(x, (int, float)) and math.isfinite(x) for x in found)
    if not isinstance(found, list) or not finite or len(found) != len(ids):
        raise server.error("returns no log-prob for each token (`logprobs`)")
    return tuple(ids), tuple(map(float, found)), choice.get("finish_reason")


def _names(card: Mapping[str, Any]) -> set[str]:
    found = {str(value) for value in (card["id"], card.get("root")) if value}
    return found | {_path(value) for value in found}


def _path(name: str | Path) -> str:
    """The same folder under different names; a hub id becomes a path that is nobody's."""
    return str(Path(name).resolve())
