"""The tool-call parser: the forms that small models write, and that no text breaks it."""

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from env.tools import NO_CALL, InvalidTurn, ToolCall, format_call, parse_turn

PLAN = {"event_type": "farewell", "date": "next week", "guest_count": 20, "venue": "rented hall (2nd floor)"}

FORMS = [
    ('ask_question("Budget for food (in EUR, e.g. 500)?")', "Budget for food (in EUR, e.g. 500)?"),
    ('ask_question(question="Formal, casual, or just fun :) ?")', "Formal, casual, or just fun :) ?"),
    (r'ask_question("They said \"cheap\" - how cheap?")', 'They said "cheap" - how cheap?'),
    ('ASK: {"question": "Which day suits you?"}', "Which day suits you?"),
    ('TOOL: ask_question\nARGS: {"question": "Which day?"}', "Which day?"),
    ('ask_question("预算大约多少（人民币）？🎂")', "预算大约多少（人民币）？🎂"),
    ('<tool_call>\n{"name": "ask_question", "arguments": {"question": "Which day?"}}\n</tool_call>', "Which day?"),
    ('<tool_call>{"arguments": {"question": "Which day?"}, "name": "ask_question"}</tool_call>', "Which day?"),
    ('<tool_call>{"name": "ask_question", "arguments": "{\\"question\\": \\"Which day?\\"}"}', "Which day?"),
    ("<tool_call>{'name': 'ask_question', 'arguments': {'question': 'Which day?',},}", "Which day?"),
    ('<tool_call>\nask_question("Which day?")\n</tool_call>', "Which day?"),
    ('{"name": "ask_question", "arguments": {"question": "Which day?"}}', "Which day?"),
    ('```json\n{"name": "ask_question", "parameters": {"question": "Which day?"}}\n```', "Which day?"),
    ('Sure (in a moment). I call ask_question("Which day?") now.', "Which day?"),
    ('ask_question({"question": "Which day?"})', "Which day?"),
    ("ask_question ( question = 'Which day?', )", "Which day?"),
    ('<tool_call>{"name": "ask_question", "arguments": {"question": "a </tool_call>"}}</tool_call>', "a </tool_call>"),
    ('ask_question("One line\nand another?")', "One line\nand another?"),
    (r'ask_question("caf\u00e9 \ud83c\udf82?")', "café 🎂?"),
]


@pytest.mark.parametrize("text, question", FORMS)
def test_forms_of_a_question_keep_its_text(text, question):
    assert parse_turn(text) == ToolCall("ask_question", {"question": question})


@pytest.mark.parametrize(
    "text, plan",
    [
        (f"propose_plan(plan='{json.dumps(PLAN)}')", PLAN),
        (f"propose_plan({json.dumps(PLAN)})", PLAN),
        (f"propose_plan({PLAN})", PLAN),
        (f"propose_plan({{'plan': {PLAN}}})", PLAN),
        ('PROPOSE: {"date": "today", "time": "morning", "participants": "leadership"}',
         {"date": "today", "time": "morning", "participants": "leadership"}),
        (format_call("propose_plan", {"plan": PLAN}), PLAN),
        (format_call("propose_plan", {"plan": json.dumps(PLAN)}), PLAN),
        (format_call("propose_plan", {"plan": str(PLAN)}), PLAN),
        (format_call("propose_plan", PLAN), PLAN),
        ("propose_plan(date='today', time='noon')", {"date": "today", "time": "noon"}),
        ('propose_plan({"a": true, "b": null, "c": [1, 2.5, {}], "d": False, "e": None, "f": (1, "x")})',
         {"a": True, "b": None, "c": [1, 2.5, {}], "d": False, "e": None, "f": [1, "x"]}),
        ("propose_plan({})", {}),
    ],
)  # fmt: skip
def test_forms_of_a_plan(text, plan):
    assert parse_turn(text) == ToolCall("propose_plan", {"plan": plan})


@pytest.mark.parametrize(
    "text",
    ["tool: get_task_info", "TOOL: get_task_info\nARGS: {}", "get_task_info()", format_call("get_task_info", {}),
     '<tool_call>{"name": "get_task_info"}</tool_call>'],
)  # fmt: skip
def test_forms_of_get_task_info(text):
    assert parse_turn(text) == ToolCall("get_task_info", {})


@pytest.mark.parametrize(
    "text, reason",
    [
        ('proposed_plan({"stack": "go+gin"})', "unknown tool 'proposed_plan'"),
        ('Ask_Question("Which day?")', "unknown tool 'Ask_Question'"),
        ('my_ask_question("Which day?")', "unknown tool 'my_ask_question'"),
        ('proposed_plan({})\nask_question("Which day?")', "unknown tool 'proposed_plan'"),
        ('<tool_call>{"name": "propose", "arguments": {"plan": {}}}</tool_call>', "unknown tool 'propose'"),
        ("TOOL: ask_user", "unknown tool 'ask_user'"),
        ("Which day suits you?", NO_CALL),
        ("", NO_CALL),
        ("I would use ask_question", NO_CALL),
        ("ask_question()", "ask_question needs a question"),
        ('ask_question(" ")', "ask_question needs a question"),
        ("ask_question(7)", "ask_question needs a question"),
        ('ask_question("a", "b")', "too many arguments for ask_question"),
        ('ask_question("Which day?"', "unreadable arguments: a closing parenthesis is missing"),
        ("ask_question(Which day?)", "unreadable arguments: a value is missing"),
        ('ask_question("Which day?)', "unreadable arguments: a string is not closed"),
        ('<tool_call>{"name": "ask_question", "arguments": {"question": "x"}</tool_call>',
         "unreadable tool call: a comma is missing in an object"),
        ('<tool_call>{"name": "ask_question", "arguments": {"question"', "unreadable tool call: a colon is missing"),
        ("<tool_call>", "unreadable tool call: it ends too early"),
        ('<tool_call>["ask_question"]</tool_call>', "the tool call has no name"),
        ('<tool_call>{"name": 3}</tool_call>', "the tool call has no name"),
        ('<tool_call>{"name": "ask_question", "arguments": ["x"]}</tool_call>',
         "unreadable arguments: not a JSON object"),
        ('{"event_type": "birthday"}', "the tool call has no name"),
        ("propose_plan()", "propose_plan needs a plan"),
        ("propose_plan(plan='a nice party')", "unreadable plan: a value is missing"),
        ("propose_plan(plan='{} and more')", "unreadable plan: there is text after the value"),
        ("propose_plan([1])", "unreadable plan: not a JSON object"),
        ("propose_plan(null)", "unreadable plan: not a JSON object"),
        ('propose_plan({"a": NaN})', "unreadable arguments: a value is missing"),
        ('propose_plan({"a": 1e999})', "unreadable arguments: a number is too large"),
        ('propose_plan({"a": %s})' % ("9" * 5000), "unreadable arguments: a value is missing"),
        ("propose_plan({1: 2})", "unreadable arguments: a key must be a quoted string"),
        ("propose_plan(%s)" % ("[" * 100_000), "unreadable arguments: nested too deeply"),
        ('propose_plan({"a": [1, 2', "unreadable arguments: a list is not closed"),
        ("propose_plan({", "unreadable arguments: an object is not closed"),
    ],
)  # fmt: skip
def test_invalid_turns_say_why(text, reason):
    assert parse_turn(text) == InvalidTurn(reason)


@pytest.mark.parametrize(
    "text, name",
    [
        ('<think>\nMaybe propose_plan({"date": "x"}) later.\n</think>\n\nask_question("Which day?")', "ask_question"),
        ('Maybe propose_plan({}) later.\n</think>\n\nask_question("Which day?")', "ask_question"),
        ('<think>\n\n</think>\n\n<tool_call>\n{"name": "get_task_info", "arguments": {}}\n</tool_call>',
         "get_task_info"),
        ('<think>a <think> propose_plan({})</think> propose_plan({})</think>get_task_info()', "get_task_info"),
        ('<think>a</think>get_task_info() <think>propose_plan({})</think>', "get_task_info"),
        ("get_task_info() <think>propose_plan({})", "get_task_info"),
    ],
)  # fmt: skip
def test_calls_inside_reasoning_are_not_run(text, name):
    call = parse_turn(text)
    assert (call.name, call.dropped_calls) == (name, False)


def test_reasoning_that_was_cut_off_holds_no_call():
    text = '<think>\nI could call ask_question("a") or'
    assert parse_turn(text, truncated=True) == InvalidTurn("cut off by the length limit")
    assert parse_turn(text) == InvalidTurn(NO_CALL)


def test_a_truncated_turn_is_never_run():
    assert isinstance(parse_turn('ask_question("Which day?")', truncated=True), InvalidTurn)


TWO_BLOCKS = (
    format_call("ask_question", {"question": "Which day?"})
    + "\n"
    + format_call("propose_plan", {"plan": {"date": "today", "time": "morning", "participants": "leadership"}})
)


@pytest.mark.parametrize(
    "text, question", [(TWO_BLOCKS, "Which day?"), ('ask_question("A?")\nask_question("B?")', "A?")]
)
def test_of_several_calls_the_first_is_run_and_the_rest_reported(text, question):
    assert parse_turn(text) == ToolCall("ask_question", {"question": question}, dropped_calls=True)


def test_of_duplicate_keys_the_last_counts():
    text = '{"name": "get_task_info", "name": "propose_plan", "arguments": {"plan": {"date": "a", "date": "b"}}}'
    assert parse_turn(text) == ToolCall("propose_plan", {"plan": {"date": "b"}})


def test_lone_surrogates_and_nul_can_be_logged():
    call = parse_turn('ask_question("a\ud800b\\udfffc\\u0000d\0?")')
    assert call.arguments == {"question": "a\ufffdb\ufffdc\ufffdd\ufffd?"}
    call.arguments["question"].encode("utf-8")


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@given(st.dictionaries(TEXT, st.one_of(TEXT, st.integers(-(10**15), 10**15), st.booleans(), st.none())))
def test_any_plan_in_qwens_form_is_read_back(plan):
    assert parse_turn(format_call("propose_plan", {"plan": plan})).arguments == {"plan": plan}


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "ask_question", "propose_plan", "get_task_info", "TOOL: ",
     "ARGS: ", "ASK: ", "PROPOSE:", "(", ")", "{", "}", "[", "]", '"', "'", "\\", "\\u", "\\ud800", ",", ":", "=", " ",
     "\n", "name", "arguments", "question", "plan", "NaN", "-", "1e999", "null", "\0", "\ud800", "é", '"name": ', "x"]
)  # fmt: skip


@given(st.one_of(st.text(st.characters()), st.lists(PIECES, max_size=40).map("".join)), st.booleans())
@example("propose_plan(" + '{"a":' * 500, False)
@example("\ud800", False)
def test_any_text_gives_a_call_or_a_reason(text, truncated):
    call = parse_turn(text, truncated)
    if isinstance(call, InvalidTurn):
        assert call.reason and "\n" not in call.reason and len(call.reason) < 100
        call.reason.encode("utf-8")
    else:
        # What was read is strict JSON and can be written to a file.
        json.dumps(call.arguments, allow_nan=False, ensure_ascii=False).encode("utf-8")


@pytest.mark.parametrize(
    "piece",
    ["ask_question(", 'ask_question("', "<tool_call>", "<tool_call>{", "<think>", "</think>", "a", "a_", "a_b ", " ",
     "\n", " \n", "\\", '"', "'\\", "{", "[", "(", '{"a":', "[1,", "ASK: ", "ASK:\n", "TOOL: a", "TOOL:a \n", "\t", "=",
     "9", "ask_question ", "\\u12", "{}", '"a",', "A ", "ARGS:\n"],
)  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "ask_question(", 'ask_question("', '<tool_call>{"a": [', "TOOL: a_b\n"])
def test_time_is_linear_in_the_length(prefix, piece):
    """200 thousand characters take well under a second; a quadratic step takes minutes."""
    text = prefix + piece * (200_000 // len(piece))
    start = time.perf_counter()
    parse_turn(text)
    assert time.perf_counter() - start < 2.0
