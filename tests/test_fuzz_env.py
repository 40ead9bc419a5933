"""Fuzzing the environment: parser, scenario reader, rubric, whole episodes; and that time grows in line with text.

`python -m tests.fuzz_episodes --episodes 10000 --seed 0` is the long version of the last test of episodes here.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from env import tools
from env.clarify import ClarifyEnv, EpisodeRecord, Question, StopReason
from env.families import FAMILIES
from env.literals import printable, read_whole
from env.policies import ScriptedPolicy, play
from env.rubrics import RUBRICS, reward, same_value, score
from env.time_limit import time_limit
from env.tools import TOOL_NAMES, InvalidTurn, ToolCall, format_call, parse_turn
from env.user_simulator import answer
from scenarios.generator import generate
from scenarios.schema import Scenario, load_scenarios
from tests import fuzz_episodes
from tests.test_env import PARTY

MORE = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

ANY_TEXT = st.text(st.characters())  # lone surrogates and NUL included
CLEAN_TEXT = ANY_TEXT.filter(lambda text: printable(text) == text)
JSON_LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.just(-(10**400)), st.floats(), ANY_TEXT)
JSON_VALUES = st.recursive(
    JSON_LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4), max_leaves=8
)
OUTPUTS = st.builds(
    lambda seed, number: fuzz_episodes.random_output(random.Random(seed), generate(number)),
    st.integers(0, 2**32), st.integers(0, 50),
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------------- parser


def assert_well_formed(call: ToolCall | InvalidTurn) -> None:
    if isinstance(call, InvalidTurn):
        assert call.reason and call.reason.isprintable() and len(call.reason) < 100
        return
    assert call.name in TOOL_NAMES
    if call.name == "ask_question":
        assert set(call.arguments) == {"question"} and call.arguments["question"].strip()
    elif call.name == "propose_plan":
        assert set(call.arguments) == {"plan"} and isinstance(call.arguments["plan"], dict)
    else:
        assert call.arguments == {}
    json.dumps(call.arguments, allow_nan=False, ensure_ascii=False).encode()


@MORE
@given(st.one_of(OUTPUTS, ANY_TEXT), st.booleans())
@example(format_call("a\nb\ud800" + "x" * 1000, {}), False)
@example('propose_plan({"a": 1e999})', False)
def test_any_text_gives_one_well_formed_call_or_a_reason(text, truncated):
    call = parse_turn(text, truncated)
    assert_well_formed(call)
    assert parse_turn(text, truncated) == call
    assert not truncated or isinstance(call, InvalidTurn)


@given(CLEAN_TEXT.filter(str.strip), st.sampled_from(range(5)))
def test_a_question_comes_back_from_every_form(question, form):
    quoted = json.dumps(question, ensure_ascii=False)
    if form and ("<think>" in question or "</think>" in question):
        return  # the tags count wherever they stand
    text = (
        format_call("ask_question", {"question": question}), f"ask_question({quoted})",
        f"ask_question(question={quoted})", f'ASK: {{"question": {quoted}}}',
        f'TOOL: ask_question\nARGS: {{"question": {quoted}}}',
    )[form]  # fmt: skip
    if "think>" not in question:
        assert parse_turn(text) == ToolCall("ask_question", {"question": question})


@given(OUTPUTS, OUTPUTS)
def test_reasoning_changes_nothing(thought, text):
    thought = thought.replace("</think>", "")
    assert parse_turn(f"<think>{thought}</think>{text}") == parse_turn(text.split("</think>", 1)[-1]) or (
        "</think>" in text  # a later closing tag belongs to a thought that began in the prompt
    )
    assert parse_turn(f"{thought}<think>{text}".replace("</think>", "")) == parse_turn(thought.split("<think>")[0])


@MORE
@given(JSON_VALUES)
def test_the_reader_agrees_with_json(value):
    """What both read is the same; what this reader refuses is what its docstring says."""
    text = json.dumps(value)
    try:
        found = read_whole(text)
    except ValueError as error:
        strange = re.search(r"NaN|Infinity|\d{31}|e[+-]?\d{4}", text)
        assert strange or "too large" in str(error), (text, error)
        return

    def cleaned(item):
        if isinstance(item, dict):
            return {printable(key): cleaned(inner) for key, inner in item.items()}
        if isinstance(item, list):
            return [cleaned(inner) for inner in item]
        return printable(item) if isinstance(item, str) else item

    assert found == cleaned(json.loads(text))


# --------------------------------------------------------------------------------------------------- scenario reader

FOLDER = Path(tempfile.mkdtemp(prefix="fuzz_scenarios_"))
GOOD = generate(3, "hard", "event_planning").model_dump(mode="json")


def read(content: bytes) -> list[Scenario] | None:
    """What the reader makes of a file; None where it refuses it in one line that names the file."""
    path = FOLDER / "file.json"
    path.write_bytes(content)
    try:
        return load_scenarios(path)
    except ValueError as error:
        text = str(error)
        assert type(error) is ValueError and text.startswith(f"{path}: ") and "\n" not in text and len(text) < 500
        text.encode()
        return None


@MORE
@given(st.one_of(st.binary(max_size=200), JSON_VALUES.map(lambda value: json.dumps(value).encode())))
@example(b"[" * 100_000)
@example(b'[{"seed": 1' + b"0" * 5000 + b"}]")
@example(b"\xef\xbb\xbf[]")
def test_any_file_is_read_or_refused_in_one_line(content):
    assert read(content) is None  # no such thing is a scenario


@MORE
@given(
    changes=st.dictionaries(st.sampled_from(list(GOOD)), JSON_VALUES, max_size=2),
    profile=st.dictionaries(
        st.one_of(st.sampled_from(list(GOOD["hidden_profile"])), ANY_TEXT),
        st.one_of(JSON_LEAVES, CLEAN_TEXT),
        max_size=4,
    ),
    request=st.one_of(st.none(), ANY_TEXT),
)
@example(changes={}, profile={"venue": "\ud800"}, request=None)
@example(changes={}, profile={"venue": " \n"}, request=None)
@example(changes={}, profile={"guest_count": 10**16}, request=None)
@example(changes={}, profile={"a\nb" * 1000: ""}, request=None)
@example(changes={}, profile={}, request="a\0")
def test_a_changed_scenario_is_refused_or_can_be_played(changes, profile, request):
    scenario = GOOD | {"hidden_profile": GOOD["hidden_profile"] | profile} | changes
    scenario |= {} if request is None else {"request": request}
    loaded = read(json.dumps([scenario]).encode())
    if loaded is None:
        return
    text = json.dumps(loaded[0].model_dump(), ensure_ascii=False)
    assert printable(text) == text
    for policy in ("ask-all", "guess"):
        record, turns = play(ScriptedPolicy(policy), loaded[0])
        fuzz_episodes.check_record(record, [(text, reply) for text, reply in turns if reply and len(reply) < 1000])
    told = dict(loaded[0].hidden_profile)
    honest = EpisodeRecord(loaded[0], plan=told, num_turns=1, stop_reason=StopReason.PLAN)
    assert score(honest).output_correctness == 1 and score(honest).format_check == 1


# ----------------------------------------------------------------------------------------------------------- rubric

FIELDS = [(name, field) for name, family in FAMILIES.items() for field in family.fields]
FIELD_NAMES = st.sampled_from([field for _, field in FIELDS])
RECORDS = st.builds(
    lambda plan, asked, reason, number: EpisodeRecord(
        generate(number), tuple(Question("?", "!", field) for field in asked), plan, 3, 1, reason
    ),
    st.one_of(JSON_VALUES, st.dictionaries(FIELD_NAMES | ANY_TEXT, JSON_VALUES, max_size=6)),
    st.lists(FIELD_NAMES | st.none(), max_size=8),
    st.sampled_from([None, *StopReason]), st.integers(0, 200),
)  # fmt: skip


@MORE
@given(RECORDS)
def test_any_record_has_finite_scores_and_rewards(record):
    result = score(record)
    for name, value in vars(result).items():
        if name != "hallucination_rate" or value is not None:
            assert type(value) is float and 0 <= value <= 1 + 1e-12, name
    assert all(-0.1 <= reward(record, rubric) <= 1 + 1e-12 for rubric in RUBRICS)
    assert score(record) == result
    if not record.plan_accepted:
        assert result.card == result.gated == 0


@given(st.sampled_from(FIELDS), JSON_VALUES, JSON_VALUES)
def test_sameness_is_symmetric_and_never_raises(field, a, b):
    assert same_value(field[1], a, b) is same_value(field[1], b, a)
    if isinstance(a, str):
        assert same_value(field[1], a, f"  {a.upper()} ") is same_value(field[1], a.upper(), a)


# --------------------------------------------------------------------------------------------------------- episodes


@MORE
@given(st.lists(st.tuples(OUTPUTS, st.booleans()), min_size=12, max_size=12), st.integers(0, 1000))
def test_any_outputs_make_an_episode_that_ends(outputs, number):
    env = ClarifyEnv(generate(number))
    env.reset()
    turns = []
    for text, truncated in outputs:
        turns.append((text, env.step(text, truncated).reply))
        if env.record.stop_reason:
            break
    fuzz_episodes.check_record(env.record, turns)  # every scenario ends within twelve turns


def test_generated_outputs_through_full_episodes_repeat():
    first = fuzz_episodes.run(300, seed=1)
    assert first.outputs > 1200 and set(first.reasons) == {"plan", "turn_cap", "question_cap", "token_cap"}
    again = fuzz_episodes.run(300, seed=1)
    assert (again.reasons, again.characters) == (first.reasons, first.characters)


def test_the_fuzzer_notices_a_fault(monkeypatch):
    """An exception, a hang and a broken record each end it, with the number of the episode."""
    step = ClarifyEnv.step
    faults = {
        "exception": lambda env, text: 1 / ("{" not in text),
        "hang": lambda env, text: time.sleep(1),
        "budget": lambda env, text: env._update(num_turns=99),
        "log": lambda env, text: env._update(plan={"x": "\ud800"}),
    }
    monkeypatch.setattr(fuzz_episodes, "LIMIT", 0.1)
    for fault in faults.values():

        def faulty(env, text, truncated=False, fault=fault):
            result = step(env, text, truncated)
            fault(env, text)
            return result

        monkeypatch.setattr(ClarifyEnv, "step", faulty)
        with pytest.raises(RuntimeError, match="episode 0 of seed 0"):
            fuzz_episodes.run(1, seed=0)


# ------------------------------------------------------------------------------------------------------------- time

GROWING = (
    "ask_question(", 'ask_question("', "<tool_call>{", "<think>", "</think>", "<think></think>", "a_b ", "A a ", " ",
    "\n ", "\\", "'\\", "{", '{"a":', "[1,", "ASK: ", "TOOL: a\n", "=", "1 ", "about ", "\u00df", "\u0130", "'s ",
    "- _", "\ud800", "a", "9", "'",
)  # fmt: skip
SMALL, FACTOR = 25_000, 8


def work(text: str) -> None:
    """A turn with the text as it is, as a question, and as a value of a plan that is scored."""
    parse_turn(text)
    question = parse_turn(format_call("ask_question", {"question": text}))
    answer(PARTY, question.arguments["question"] if isinstance(question, ToolCall) else text)
    plan = {"venue": text, "guest_count": "about " + text, "date": "20 " + text}
    score(EpisodeRecord(PARTY, plan=plan, num_turns=1, stop_reason=StopReason.PLAN))


def growth(function, piece: str, small: int = SMALL) -> float:
    """How much more time FACTOR times the text takes; the least of three runs each, on this thread's own clock."""

    def cost(length: int) -> float:
        times = []
        for _ in range(3):
            started = time.thread_time()
            with time_limit(30):
                function(piece * (length // len(piece)) + "!")  # something that does not match, after all that did
            times.append(time.thread_time() - started)
        return min(times)

    return cost(small * FACTOR) / max(cost(small), 5e-4)


@pytest.mark.parametrize("piece", GROWING)
def test_time_grows_in_line_with_the_text(piece):
    """Eight times the text takes about eight times as long; a quadratic step anywhere would make it 64."""
    assert growth(work, piece) < 3 * FACTOR


def test_the_bound_on_growth_notices_a_quadratic_pattern(monkeypatch):
    quadratic = re.compile(tools._CALL_START.pattern + r"|(?P<more>[ \t]*\bx)", tools._CALL_START.flags)
    monkeypatch.setattr(tools, "_CALL_START", quadratic)
    assert growth(parse_turn, " ", small=400) > 3 * FACTOR
