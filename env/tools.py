r"""From a turn's text to one tool call. Total: any text gives a call or an `InvalidTurn`, in linear time.

Accepted forms, everywhere the same (the first is Qwen's own, the one that chat templates teach)::

    <tool_call>{"name": "ask_question", "arguments": {"question": "Which day?"}}</tool_call>
    {"name": "ask_question", "arguments": {"question": "Which day?"}}
    ask_question("Which day?")            ask_question(question="Which day?")
    ASK: {"question": "Which day?"}       PROPOSE: {"date": "today"}
    TOOL: ask_question\nARGS: {"question": "Which day?"}

Rules:

- Reasoning is not searched: what lies between `<think>` and `</think>`, before a `</think>` whose opening tag was in
  the prompt, or after an opening tag that is never closed.
- One call per turn: the first one decides. Where it is malformed or its name is unknown, the turn is invalid; a name
  that is nearly right is not corrected. Later calls are dropped and `ToolCall.dropped_calls` says so.
- A turn that a length limit cut off is never run, even where it holds a whole call: the model had not ended its turn.
- A plan may be an object or a string that holds one. Arguments of `propose_plan` without a `plan` key are the plan.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from env.literals import read_value, read_whole, skip_blanks
from env.prompts import TOOLS

TOOL_NAMES = tuple(tool["function"]["name"] for tool in TOOLS)
NO_CALL = "no tool call"

# Where a call may begin. Every alternative is linear: no repetition can match the same text in two ways.
_CALL_START = re.compile(
    r"""(?P<tag><tool_call>)
      | (?<![\w.])(?P<function>[A-Za-z_]\w*)(?P<gap>\s*)\(
      | ^[ \t]*(?P<verb>ASK|PROPOSE)[ \t]*:\s*(?=\{)
      | ^[ \t]*TOOL[ \t]*:[ \t]*(?P<tool>[A-Za-z_]\w*)[ \t]*$
      | ^[ \t]*(?P<bare>(?=\{))""",
    re.VERBOSE | re.MULTILINE | re.IGNORECASE,
)
_ARGS = re.compile(r"\s*ARGS[ \t]*:\s*(?=\{)", re.IGNORECASE)
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")
_VERBS = {"ask": "ask_question", "propose": "propose_plan"}


@dataclass(frozen=True)
class ToolCall:
    """A call that can be run. `arguments` is {"question": str}, {"plan": dict} or {}."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    dropped_calls: bool = False


@dataclass(frozen=True)
class InvalidTurn:
    """A turn without a call that can be run, and why: half a sentence for the model and the log."""

    reason: str


def parse_turn(text: str, truncated: bool = False) -> ToolCall | InvalidTurn:
    """The turn's first tool call, or why there is none. `truncated`: a length limit, not the model, ended the text."""
    if truncated:
        return InvalidTurn("cut off by the length limit")
    text = _without_reasoning(text)
    start = next(_call_starts(text), None)
    if start is None:
        return InvalidTurn(NO_CALL)
    try:
        name, arguments, end = _read_call(text, start)
        arguments = _checked(name, arguments)
    except ValueError as error:
        return InvalidTurn(str(error))
    return ToolCall(name, arguments, dropped_calls=next(_call_starts(text, end), None) is not None)


def format_call(name: str, arguments: dict[str, object]) -> str:
    """A call in Qwen's form, which `parse_turn` reads back."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _without_reasoning(text: str) -> str:
    *thoughts, rest = text.split("</think>")
    # A thought without an opening tag began in the prompt, so all of it is reasoning.
    spoken = [thought.split("<think>", 1)[0] for thought in thoughts if "<think>" in thought]
    return "".join([*spoken, rest.split("<think>", 1)[0]])


def _call_starts(text: str, pos: int = 0) -> Iterator[re.Match]:
    """Places that look like a call. Prose such as "dinner (at home)" does not; `snake_case(` does, known or not."""
    for match in _CALL_START.finditer(text, pos):
        name = match["function"]
        if name is None or name in TOOL_NAMES or ("_" in name and not match["gap"]):
            yield match


def _read_call(text: str, start: re.Match) -> tuple[str, object, int]:
    """(tool name, raw arguments, position after the call). Raises ValueError."""
    if start["function"]:
        return _read_function(text, start)
    if start["verb"]:
        return _VERBS[start["verb"].lower()], *_read(text, start.end(), "arguments")
    if start["tool"]:
        args = _ARGS.match(text, start.end())
        return start["tool"], *(_read(text, args.end(), "arguments") if args else ({}, start.end()))
    if start["tag"]:
        inner = _CALL_START.match(text, skip_blanks(text, start.end()))
        if inner and inner["function"]:
            return _read_function(text, inner)
    call, end = _read(text, start.end(), "tool call")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("the tool call has no name")
    return call["name"], call.get("arguments", call.get("parameters", {})), end


def _read_function(text: str, start: re.Match) -> tuple[str, object, int]:
    """`name(value)`, `name(key=value, ...)` or `name()`; a positional value is the tool's only argument."""
    name = _known(start["function"])
    pos, arguments = start.end(), dict[str, object]()
    while text[(pos := skip_blanks(text, pos)) : pos + 1] != ")":
        keyword = _KEYWORD.match(text, pos)
        if keyword is None and arguments:
            raise ValueError(f"too many arguments for {name}")
        value, pos = _read(text, keyword.end() if keyword else pos, "arguments")
        if keyword:
            arguments[keyword[1]] = value
        elif isinstance(value, dict) and (name != "propose_plan" or "plan" in value):
            arguments = value
        else:
            arguments = {"ask_question": {"question": value}, "propose_plan": {"plan": value}}.get(name, {})
        pos = skip_blanks(text, pos)
        if text[pos : pos + 1] == ",":
            pos += 1
        elif text[pos : pos + 1] != ")":
            raise ValueError("unreadable arguments: a closing parenthesis is missing")
    return name, arguments, pos + 1


def _read(text: str, pos: int, what: str) -> tuple[object, int]:
    try:
        return read_value(text, pos)
    except ValueError as error:
        raise ValueError(f"unreadable {what}: {error}") from None


def _known(name: str) -> str:
    if name not in TOOL_NAMES:
        raise ValueError(f"unknown tool {name[:40]!r}")
    return name


def _checked(name: str, arguments: object) -> dict[str, object]:
    """The arguments that the tool takes, of the right type; others are ignored. Raises ValueError."""
    _known(name)
    arguments = _object(arguments, "arguments")
    if name == "ask_question":
        question = arguments.get("question")
        if not isinstance(question, str) or not question.strip():
            raise ValueError("ask_question needs a question")
        return {"question": question}
    if name == "propose_plan":
        if not arguments:
            raise ValueError("propose_plan needs a plan")
        return {"plan": _object(arguments.get("plan", arguments), "plan")}
    return {}


def _object(value: object, what: str) -> dict[str, object]:
    """`value`, or the object written in it where it is a string."""
    if isinstance(value, str):
        try:
            value = read_whole(value)
        except ValueError as error:
            raise ValueError(f"unreadable {what}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"unreadable {what}: not a JSON object")
    return value
