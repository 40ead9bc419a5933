"""The bundled policy: its files, its tokens, its template, and whether it copies."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from env.clarify import ClarifyEnv
from env.families import FAMILIES
from env.prompts import TOOLS
from env.tools import InvalidTurn, ToolCall, parse_turn
from env.user_simulator import asked_field, spoken
from grpo.chat import ChatTokens
from grpo.engines.torch_engine import TorchEngine
from grpo.tiny import demos, measure
from grpo.tiny.lookup import start_with_lookup
from grpo.tiny.pretrain import Stage, bucketed, learning_rate, new_model, padded
from scenarios.generator import held_out, training_scenario

FOLDER = Path(demos.__file__).parent
VALUES = [
    (name, value) for family in FAMILIES.values() for name, field in family.fields.items() for value in field.values
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def chat(tokenizer):
    return ChatTokens(tokenizer, TOOLS)


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def contains(ids: list[int], part: list[int]) -> bool:
    return any(ids[i : i + len(part)] == part for i in range(len(ids) - len(part) + 1))


def test_files_fit_and_load(model, tokenizer):
    assert sum(path.stat().st_size for path in FOLDER.glob("*.safetensors")) <= 8_000_000
    assert model.config.model_type == "qwen3" and model.config.tie_word_embeddings
    assert model.config.vocab_size == len(tokenizer) <= 2048
    assert tokenizer.eos_token == "<|im_end|>" and model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert torch.isfinite(model(torch.tensor([encode(tokenizer, "Hello.")])).logits).all()


@pytest.mark.parametrize("name, value", VALUES)
def test_a_value_has_the_same_tokens_in_the_answer_and_in_the_plan(tokenizer, name, value):
    said = spoken(name, value)
    part = encode(tokenizer, said)
    answer = f"<tool_response>\n{name.replace('_', ' ')}: {said}.\n</tool_response>"
    for text in (answer, f'{{"{name}": "{said}", "', f'"{name}": "{said}"}}}}}}\n</tool_call>'):
        assert contains(encode(tokenizer, text), part), tokenizer.tokenize(text)
    # The words that come before a value, in the answer as in the plan, end with the same token.
    key, spaced = encode(tokenizer, name), encode(tokenizer, name.replace("_", " "))
    assert key[-1] == spaced[-1] and contains(encode(tokenizer, f'{{"{name}": "'), key)


def test_tokenizer_returns_any_text(tokenizer):
    for text in ("Grüße, 東京! 🎂", " a  b\n\n c", "<tool_call>x</tool_call><think>\n", "it's 3.14159e-10 #_$%"):
        assert tokenizer.decode(encode(tokenizer, text)) == text


def test_turns_only_ever_append(tokenizer, chat):
    """The template's rendering of n + 1 turns begins with that of n turns, and so do the ids the rollout builds."""
    scenario = held_out(1)[0]
    env = ClarifyEnv(scenario)
    messages = env.reset()
    ids = list(chat.first_prompt(messages))
    for name in list(scenario.hidden_profile) + ["nonsense"]:
        text = demos.question_turn(f"What is the {name}?")
        reply = env.step(text).reply
        ids += encode(tokenizer, text + "<|im_end|>") + list(chat.reply_ids(reply))
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "tool", "content": reply}]
        rendered = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
        assert encode(tokenizer, rendered) == ids


def test_template_renders_calls_as_qwen_does(tokenizer):
    call = {"type": "function", "function": {"name": "ask_question", "arguments": {"question": "Which day?"}}}
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}], tokenize=False
    )
    turn = rendered.split("<|im_start|>assistant\n")[1].removesuffix("<|im_end|>\n")
    assert turn == '<tool_call>\n{"name": "ask_question", "arguments": {"question": "Which day?"}}\n</tool_call>'
    assert parse_turn(turn) == ToolCall("ask_question", {"question": "Which day?"})


def test_greedy_copying(model, chat):
    """What the user answered lands in the plan, for values of the lists and for words that no list holds."""
    engine = TorchEngine(model, chat.eos_ids)
    scenarios = held_out(15)
    vocabulary = demos.Vocabulary(chat)
    invented = [demos.with_invented_values(s, vocabulary, random.Random(i)) for i, s in enumerate(scenarios)]
    assert measure.copying(engine, chat, scenarios)["right_where_present"] > 0.95
    # Memory would get none of these right; the whole held-out set gives 91 %, fifteen scenarios scatter around it.
    assert measure.copying(engine, chat, invented)["right_where_present"] > 0.75


def test_the_base_neither_fails_always_nor_succeeds_always(model, chat):
    figures = measure.groups(TorchEngine(model, chat.eos_ids), chat, held_out(5))
    assert figures["groups_with_spread"] >= 0.5
    assert 0 < sum(figures["plans_by_family"].values()) < 40


# ------------------------------------------------------------------------------------------------------ how it is made


def test_vain_questions_reveal_nothing():
    demos.check_texts()
    assert asked_field("event_planning", "What is the venue?") == "venue"


@pytest.mark.parametrize("habits", [demos.CLEAN, demos.IMPERFECT])
def test_demonstrations_copy_every_answer_and_learn_no_reply(chat, habits):
    vocabulary = demos.Vocabulary(chat)
    for index in range(40):
        scenario = training_scenario(3, index)
        player = demos.Demonstrator(vocabulary, scenario, habits, random.Random(index))
        example = player.play()
        record = player.env.record
        learnt = chat.tokenizer.decode([i for i, weight in zip(example.ids, example.weights) if weight])
        assert "<tool_response>" not in learnt and "Budget:" not in learnt
        assert all(question.answer not in learnt for question in record.questions)
        if record.plan_accepted:
            asked = {name for name in record.revealed if name in record.plan}
            assert asked == set(record.revealed)
            assert all(record.plan[name] == spoken(name, scenario.hidden_profile[name]) for name in asked)


def test_recall_examples_weigh_the_values(chat):
    vocabulary = demos.Vocabulary(chat)
    example = demos.recall(vocabulary, random.Random(0), 3, as_replies=False)
    text = chat.tokenizer.decode(example.ids)
    facts, plan = text.split("<tool_call>")
    call = parse_turn("<tool_call>" + plan)
    looked_up = chat.tokenizer.decode([i for i, weight in zip(example.ids, example.weights) if weight == demos.VALUE])
    assert "".join(call.arguments["plan"].values()) == looked_up
    for key, value in call.arguments["plan"].items():
        assert f"{key.replace('_', ' ')}: {value}.\n" in facts


def test_every_way_to_break_the_format_is_an_invalid_turn():
    chatter = [*demos.CHATTER, demos.question_turn("What is the date?", close='"}\n</tool_call>')]
    assert all(isinstance(parse_turn(text), InvalidTurn) for text in chatter)
    assert isinstance(parse_turn(demos.question_turn("What is the date?")), ToolCall)


def test_look_back_heads_attend_one_and_two_tokens_back(tokenizer):
    torch.manual_seed(0)
    fresh = new_model(tokenizer, hidden=128, layers=2, heads=4, intermediate=64, context=128)
    fresh.set_attn_implementation("eager")
    start_with_lookup(fresh)
    ids = torch.randint(300, 1400, (2, 40))
    attention = fresh(ids, output_attentions=True).attentions[0]  # [B, H, T, T]
    for head, offset in ((0, 1), (1, 2)):
        assert (attention[:, head, 3:].argmax(-1) == torch.arange(3, 40) - offset).all()


def test_batches_hold_examples_of_similar_length():
    lengths = iter(range(1000))
    stage = Stage("x", lambda rng: demos.Example([1] * (next(lengths) % 37 + 1), [1.0] * 37), 10, 4, 1e-3, warmup=5)
    for _, batch in zip(range(8), bucketed(stage, random.Random(0))):
        sizes = [len(example.ids) for example in batch]
        assert len(sizes) == 4 and max(sizes) - min(sizes) <= 4
    assert learning_rate(stage, 0) == pytest.approx(1e-3 / 5) and learning_rate(stage, 9) < 2e-4


def test_padding_carries_no_weight():
    ids, weights = padded([demos.Example([5, 6], [0.0, 1.0]), demos.Example([7, 8, 9], [1.0, 1.0, 1.0])], pad_id=0)
    assert ids.tolist() == [[5, 6, 0], [7, 8, 9]]
    assert weights.tolist() == [[0, 1, 0], [1, 1, 1]]
