"""One turn of a conversation at an OpenAI-compatible chat endpoint: messages in, messages out.

    python eval.py --api-base http://localhost:11434/v1 --model qwen3:4b

What local models read through their chat template goes out as it is: the same messages, the same three tools. Endpoints
differ in how they say that a tool is called, in what they take, and in how they refuse, so here is how each is read:

- Calls: `tool_calls`, or else the text itself, become the text that local models speak, for the same parser.
- Reasoning, in a field of its own or in <think> tags, is kept for people to read. It is no part of the turn.
- `seed` is left out, and `max_tokens` becomes `max_completion_tokens`, where the endpoint says that it wants so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from env.literals import printable
from env.prompts import TOOLS
from env.tools import format_call
from grpo.config import UsageError
from grpo.endpoint import Retries, Server, ServerError
from grpo.sampling import SamplingConfig

Message = dict[str, Any]
Finish = Literal["stop", "length", "content_filter"]

KEY_VARIABLE = "OPENAI_API_KEY"
CONTACT_SECONDS = 30.0
READ_SECONDS = 300.0
"""Until a turn counts as lost: it may be a long thought, behind others, on a slow machine."""
RETRIES = Retries(
    total=8,
    allowed_methods=None,
    status_forcelist=(408, 409, 425, 429, 500, 502, 503, 504, 529),
    backoff_factor=1.0,  # 0, 2, 4, ... 60 seconds, three minutes together, or what Retry-After says
    backoff_max=60,
    backoff_jitter=1.0,
    retry_after_max=120,
    redirect=0,
    raise_on_status=False,
)
OWN_FIELDS = ("model", "messages", "tools", "temperature", "top_p", "seed", "max_tokens", "max_completion_tokens",
              "stream", "n")  # fmt: skip
FILTERED, CONTEXT_FULL = "content filter", "context full"
"""Kinds of a `ServerError` that say something of the episode, not of the endpoint."""
NOT_RUN = "Not run: only the first call of a turn is."
EMPTY = "(nothing)"
"""Stands in the conversation for a turn without a word: many endpoints refuse an empty message."""


@dataclass(frozen=True)
class Answer:
    """A turn as an endpoint gave it."""

    text: str
    """To be read by people, reasoning in <think> tags included."""
    spoken: str
    """What the environment reads."""
    finish: Finish
    message: Message
    """The turn as it goes back with the next request."""
    call_ids: tuple[str, ...] = ()
    """Of the calls in `message`, each of which must be answered."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def replies(self, text: str) -> list[Message]:
        """The environment's reply as the messages after this turn."""
        if not self.call_ids:
            return [{"role": "user", "content": text}]
        contents = [text] + [NOT_RUN] * (len(self.call_ids) - 1)
        return [
            {"role": "tool", "tool_call_id": call, "content": content} for call, content in zip(self.call_ids, contents)
        ]


class ChatEndpoint:
    """A model behind a chat endpoint.

    Args:
        url: the base address, with or without `/v1`.
        model: its name there.
        tools: `native` sends the tools as such; `prompt` describes them in the system message, for endpoints or models
            that know none.
        extra: further fields of every request, such as `reasoning_effort`.

    The key is read from `OPENAI_API_KEY`. Raises UsageError where the address is none.
    """

    def __init__(
        self,
        url: str,
        model: str,
        tools: Literal["native", "prompt"] = "native",
        extra: Mapping[str, Any] | None = None,
        connections: int = 8,
    ):
        self.asked_for, self.model, self.tools, self.extra = url, model, tools, dict(extra or {})
        for name in self.extra:
            if name in OWN_FIELDS:
                raise UsageError(f"--api-extra {name}: is set by eval.py itself; leave it out")
        self.server = Server(
            url.strip().rstrip("/").removesuffix("/chat/completions"),
            timeout=READ_SECONDS,
            retries=RETRIES,
            connections=connections,
            flag="--api-base",
            key_variable=KEY_VARIABLE,
            advice="is it running, and the address right?",
        )
        self.url = self.server.url
        self.prefix = "/v1"
        self.models: list[str] = []
        self.left_out: set[str] = set()
        """Fields that the endpoint does not take."""

    @property
    def about(self) -> dict[str, Any]:
        """What a report should say of how it was asked, JSON types."""
        return {"api": "chat", "tools": self.tools, "extra": self.extra, "left_out": sorted(self.left_out)}

    def connect(self) -> None:
        """Find where its addresses begin, and which models it names. Raises ServerError where nobody answers, or not
        to this key."""
        for prefix in ("/v1", ""):
            try:
                cards = self.server.get(f"{prefix}/models", CONTACT_SECONDS).get("data")
            except ServerError as error:
                if error.status == 401 or error.kind == "no answer":  # 403: the key may be good for turns alone
                    raise
                continue
            if isinstance(cards, list):
                self.models = [str(card["id"]) for card in cards if isinstance(card, dict) and card.get("id")]
                self.prefix = prefix
                return
        # Not every endpoint lists its models. Then the address is as it was given, /v1 included.
        written = self.asked_for.rstrip("/").removesuffix("/chat/completions")
        self.prefix = "/v1" if written.endswith("/v1") or self.url.count("/") == 2 else ""

    def answer(self, messages: Sequence[Message], max_tokens: int, sampling: SamplingConfig, seed: int) -> Answer:
        """The next turn. Safe to call from several threads. Raises ServerError."""
        while True:
            body = self._body(messages, max_tokens, sampling, seed)
            try:
                return self._read(self.server.post(f"{self.prefix}/chat/completions", body))
            except ServerError as error:
                if error.status not in (400, 422) or not self._adapt(body, error.detail.lower()):
                    raise self._explained(error) from error

    def _body(self, messages: Sequence[Message], max_tokens: int, sampling: SamplingConfig, seed: int) -> Message:
        body: Message = {"model": self.model, "messages": list(messages), "seed": seed}
        body["temperature"] = sampling.temperature
        if sampling.temperature and sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        body["max_completion_tokens" if "max_tokens" in self.left_out else "max_tokens"] = max_tokens
        if self.tools == "native":
            body["tools"] = TOOLS
        else:
            system, *rest = body["messages"]
            body["messages"] = [system | {"content": f"{system['content']}\n\n{tools_as_text()}"}, *rest]
        body = {name: value for name, value in body.items() if name not in self.left_out}
        return body | self.extra

    def _adapt(self, body: Message, reason: str) -> bool:
        """Leave out what the endpoint says that it does not take. False where that is not the reason."""
        if "max_tokens" in body and "max_completion_tokens" in reason:
            self.left_out.add("max_tokens")
        elif "seed" in body and "seed" in reason:
            self.left_out.add("seed")
        else:
            return False
        return True

    def _explained(self, error: ServerError) -> ServerError:
        """The error with what can be done about it."""
        text, detail, status = str(error), error.detail.lower(), error.status
        if status == 404:
            known = ", ".join(self.models[:20]) + (", ..." if len(self.models) > 20 else "")
            there = f"it has {known}" if known else "is the address complete, as in https://host/v1?"
            return ServerError(f"{text}; --model {self.model}: {there}", error.kind, status)
        if status in (400, 422) and ("content_filter" in detail or "content management policy" in detail):
            return ServerError(text, FILTERED, status)
        if status in (400, 413, 422) and ("context length" in detail or "context_length" in detail):
            return ServerError(f"{text}; --max-completion-len may be too large", CONTEXT_FULL, status)
        if status is not None and self.tools == "native" and "tool" in detail:
            return ServerError(f"{text}; --api-tools prompt describes the tools in the text", error.kind, status)
        if status in (400, 422) and "temperature" in detail:
            return ServerError(f"{text}; such models take --temperature 1", error.kind, status)
        return error

    def _read(self, document: Mapping[str, Any]) -> Answer:
        try:
            choice = (document.get("choices") or [{}])[0]
            if error := document.get("error") or choice.get("error"):  # some say so with status 200
                what = error.get("message", error) if isinstance(error, dict) else error
                shown = self.server.clean(str(what))[:300]
                raise self.server.error(f"an error came back: {shown}", "error as an answer")
            usage = document.get("usage") or {}
            return read_choice(choice, usage.get("prompt_tokens"), usage.get("completion_tokens"))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            shown = json.dumps(dict(document))[:100]
            raise self.server.error(f"a chat completion is not as the OpenAI API has it: {shown}") from error


def read_choice(choice: Mapping[str, Any], prompt_tokens: Any = None, completion_tokens: Any = None) -> Answer:
    """An answer's choice. Raises KeyError, TypeError or AttributeError where it is none."""
    message = choice["message"]
    content = _text(message.get("content")) or _text(message.get("refusal"))
    reasoning = {name: message[name] for name in ("reasoning_content", "reasoning") if _text(message.get(name))}
    calls = [(call.get("id"), call["function"]["name"], call["function"].get("arguments"))
             for call in message.get("tool_calls") or []]  # fmt: skip
    called = "\n".join(format_call(name, _arguments(arguments)) for _, name, arguments in calls)
    said = "\n".join(filter(None, (content, called)))
    thought = next((f"<think>\n{_text(text)}\n</think>\n\n" for text in reasoning.values()), "")
    back: Message = {"role": "assistant", "content": printable(said) or EMPTY}
    ids: tuple[str, ...] = ()
    # What is no JSON object would make the endpoint fail when it comes back; as text it does not.
    if calls and all(isinstance(_arguments(arguments), dict) for _, _, arguments in calls):
        ids = tuple(str(name or f"call_{i}") for i, (name, _, _) in enumerate(calls))
        functions = [{"name": name, "arguments": json.dumps(_arguments(arguments))} for _, name, arguments in calls]
        listed = [{"id": name, "type": "function", "function": function} for name, function in zip(ids, functions)]
        # Some models must find again what they thought before a call.
        back = {"role": "assistant", "content": content or None, "tool_calls": listed} | reasoning
    finish: dict[str, Finish] = {"length": "length", "max_tokens": "length", "content_filter": "content_filter"}
    return Answer(
        text=printable(thought + said),
        spoken=printable(called or content),
        finish=finish.get(str(choice.get("finish_reason")).lower(), "stop"),
        message=back,
        call_ids=ids,
        prompt_tokens=prompt_tokens if isinstance(prompt_tokens, int) else None,
        completion_tokens=completion_tokens if isinstance(completion_tokens, int) else None,
    )


def tools_as_text() -> str:
    """The tools for a system message, and the form of a call that the parser reads and that most models know."""
    lines = [json.dumps(tool["function"]) for tool in TOOLS]
    return "\n".join(["Tools:", *lines, "", "Write a tool call as:", format_call("NAME", {"ARGUMENT": "VALUE"})])


def _text(content: Any) -> str:
    """A message's text, which may come in parts; others than text are left out."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _arguments(arguments: Any) -> Any:
    """A call's arguments as an object, where they are one: most endpoints send them as text."""
    if not arguments:
        return {}
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
