"""Model folders that are damaged, odd or hostile: each works, or is refused in one line that names the folder."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import eval as eval_script
from env.clarify import StopReason
from grpo import run
from grpo.chat import ChatTokens
from grpo.config import Config, UsageError
from grpo.console import run_entry
from grpo.model import load_policy, load_tokenizer
from grpo.rollout import rollout
from scenarios.generator import held_out
from tests import toy

Change = Callable[[Path], object]
MARKER = "code_was_run"
CODE = f"""
import pathlib
pathlib.Path(__file__).with_name("{MARKER}").touch()
from transformers import PreTrainedTokenizerFast as Tok, Qwen3Config as Config, Qwen3ForCausalLM as Model
"""


def edit(file: str, **values: object) -> Change:
    """Set keys of a JSON file; `...` removes one."""

    def change(folder: Path):
        data = json.loads((folder / file).read_text()) | values
        (folder / file).write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))

    return change


def write(file: str, content: str | bytes) -> Change:
    return lambda folder: (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def remove(*files: str) -> Change:
    return lambda folder: [(folder / file).unlink() for file in files]


def all_of(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def template(text: str) -> Change:
    return write("chat_template.jinja", text)


def before_all(text: str) -> Change:
    return template(text + toy.CHAT_TEMPLATE)


def resaved(vocab_size: int = 0, tie: bool = True) -> Change:
    """The same kind of model, with other sizes."""

    def change(folder: Path):
        tokenizer = toy.make_tokenizer()
        model = toy.make_model(tokenizer, vocab_size=len(tokenizer) + vocab_size, tie_word_embeddings=tie)
        model.save_pretrained(folder)

    return change


def added_token(used: bool) -> Change:
    """A token that was added to the tokenizer and never to the model."""

    def change(folder: Path):
        tokenizer = toy.make_tokenizer()
        tokenizer.add_tokens(["<added>"])
        if used:
            tokenizer.chat_template = toy.CHAT_TEMPLATE.replace("assistant\\n'", "assistant\\n<added>'")
        tokenizer.save_pretrained(folder)

    return change


def pickled(value: object) -> Change:
    """Weights as a pickle, the old format."""

    def change(folder: Path):
        (folder / "model.safetensors").unlink()
        torch.save(value(folder), folder / "pytorch_model.bin")

    return change


class Bomb:
    """Unpickled, it makes the marker."""

    def __init__(self, folder: Path):
        self.path = str(folder / MARKER)

    def __reduce__(self):
        return os.mkdir, (self.path,)


NO_EOS = all_of(
    edit("tokenizer_config.json", eos_token=...), edit("generation_config.json", eos_token_id=...),
    edit("config.json", eos_token_id=None),
)  # fmt: skip
REMOTE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
REWRITES = toy.CHAT_TEMPLATE.replace("message.content.split('</think>')", "('[' + message.content + ']').split('x')")

WORK: dict[str, Change] = {
    "as it is": lambda folder: None,
    "eos in the generation config only": edit("tokenizer_config.json", eos_token=...),
    "several eos": edit("generation_config.json", eos_token_id=[400, 401, 402]),
    "pad is eos": edit("tokenizer_config.json", pad_token="<|im_end|>"),
    "no pad": edit("tokenizer_config.json", pad_token=...),
    "an eos that is no id": edit("generation_config.json", eos_token_id="x"),
    "nested eos": edit("generation_config.json", eos_token_id=[[1, 2]]),
    "negative eos": edit("generation_config.json", eos_token_id=-1),
    "an eos beyond the vocabulary beside a good one": edit("generation_config.json", eos_token_id=[999_999]),
    "broken generation config": write("generation_config.json", "{"),
    "more rows than tokens": resaved(vocab_size=91),
    "untied": resaved(tie=False),
    "weights as a pickle of tensors": pickled(lambda folder: toy.make_model(toy.make_tokenizer()).state_dict()),
    "added token that nothing uses": added_token(used=False),
    "template that rewrites history": template(REWRITES),
    "several templates": all_of(
        remove("chat_template.jinja"),
        edit("tokenizer_config.json",
             chat_template=[{"name": name, "template": toy.CHAT_TEMPLATE} for name in ("default", "tool_use")]),
    ),
    "code for a known kind of model": all_of(write("code.py", CODE), edit("config.json", auto_map=REMOTE)),
    "code for its tokenizer": all_of(
        write("code.py", CODE), edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["code.Tok", "code.Tok"]})
    ),
}  # fmt: skip

REFUSED: dict[str, tuple[Change, str]] = {
    "config is not JSON": (write("config.json", "{"), "not a valid JSON file"),
    "config is empty": (write("config.json", ""), "not a valid JSON file"),
    "config is a list": (write("config.json", "[]"), "model_type"),
    "config is null": (write("config.json", "null"), "not a loadable"),
    "config is binary": (write("config.json", b"\xff\xfe\0"), "not a valid JSON file"),
    "config is deep": (write("config.json", "[" * 100_000), "recursion"),
    "no model type": (edit("config.json", model_type=..., architectures=...), "model_type"),
    "unknown model type": (edit("config.json", model_type="evil"), "`evil`"),
    "model type is a number": (edit("config.json", model_type=3), "not a loadable"),
    "not a causal model": (edit("config.json", model_type="vit"), "ViTConfig"),
    "no heads": (edit("config.json", num_attention_heads=0), "zero"),
    "width is text": (edit("config.json", hidden_size="x"), "hidden_size"),
    "width is negative": (edit("config.json", hidden_size=-1), "negative dimension"),
    "width is not the weights'": (edit("config.json", hidden_size=48), "mismatched"),
    "vocabulary is not the weights'": (edit("config.json", vocab_size=10), "not a loadable"),
    "no positions": (edit("config.json", max_position_embeddings=0), "0 positions are too few"),
    "no weights": (remove("model.safetensors"), "no file named model.safetensors"),
    "weights are empty": (write("model.safetensors", b""), "header"),
    "weights are garbage": (write("model.safetensors", b"\xff" * 1000), "header"),
    "weights claim a huge header": (write("model.safetensors", (2**62).to_bytes(8, "little") + b"{}"), "header"),
    "weights as a pickle of code": (pickled(lambda folder: {"x": Bomb(folder)}), "Weights only load failed"),
    "code for an unknown kind of model": (
        all_of(write("code.py", CODE), edit("config.json", model_type="evil", auto_map=REMOTE)), "custom code"),
    "tokenizer is not JSON": (write("tokenizer.json", "{"), "not a loadable"),
    "tokenizer is a list": (write("tokenizer.json", "[]"), "not a loadable"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), "does not close a turn"),
    "tokenizer config is a list": (write("tokenizer_config.json", "[]"), "not a loadable"),
    "no eos": (NO_EOS, "no end-of-turn token"),
    "eos beyond the vocabulary": (
        all_of(NO_EOS, edit("generation_config.json", eos_token_id=999_999)), "id 999999, the model's embedding has"),
    "added token that the template uses": (added_token(used=True), "'<added>' has id 409, the model's embedding has"),
    "no template": (remove("chat_template.jinja"), "no chat template"),
    "empty template": (template(""), "no chat template"),
    "template is a number": (
        all_of(remove("chat_template.jinja"), edit("tokenizer_config.json", chat_template=3)), "cannot render a reply"),
    "template with a syntax error": (template("{% for %}"), "Expected an expression"),
    "template that refuses": (before_all("{{ raise_exception('no\nthanks') }}"), r"\(no thanks\)"),
    "template that refuses replies": (
        before_all("{% if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}"), r"\(one turn\)"),
    "template that refuses the system prompt": (
        before_all("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"),
        r"refuses the prompt \(no system\)"),
    "template that divides by zero for a prompt": (
        before_all("{% if messages | length == 2 %}{{ 1 // 0 }}{% endif %}"), "refuses the prompt .*zero"),
    "template that divides by zero": (before_all("{{ 1 // 0 }}"), "zero"),
    "template that reads what is not there": (before_all("{{ messages[9].content.x }}"), "no element 9"),
    "template without end": (before_all("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "recursion"),
    "template with a huge loop": (before_all("{% for i in range(10**9) %}{% endfor %}"), "Range too big"),
    "template without messages": (template("hello<|im_end|>"), "does not close a turn"),
    "template with another end of turn": (
        template(toy.CHAT_TEMPLATE.replace("<|im_end|>", "<end>")), "does not close a turn"),
    "template that looks behind the sandbox": (
        before_all("{{ ''.__class__.__mro__[1].__subclasses__() }}"), "unsafe"),
    "template that calls out of the sandbox": (
        before_all("{{ cycler.__init__.__globals__.os.mkdir('" + MARKER + "') }}"), "unsafe"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # transformers asks at the terminal whether to run a folder's code; somebody who always says yes.
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))


@pytest.fixture
def broken(tmp_path, folder):
    """Makes a changed copy of the toy folder."""

    def make(change: Change) -> Path:
        copy = tmp_path / "odd"
        copy.mkdir()
        toy.make_tokenizer().save_pretrained(copy)
        for file in ("config.json", "generation_config.json", "model.safetensors"):
            (copy / file).write_bytes((folder / file).read_bytes())
        change(copy)
        return copy

    return make


def play(folder: Path):
    """All that comes before a run writes anything, and a rollout."""
    settings = Config().with_values({"model": str(folder), "device": "cpu", "max_completion_len": 60})
    policy = load_policy(settings.model)
    chat = run.make_chat(policy)
    scenarios = held_out(2)
    engine = run.make_engine(settings, policy, chat, scenarios)
    run.make_packing(settings, policy, chat, engine.max_context)
    groups = rollout(
        engine, chat, scenarios, num_generations=3, max_completion_len=60, step=0, reward_fn=lambda record: 0.0
    )
    return chat, [episode for group in groups for episode in group.episodes]


@pytest.mark.parametrize("name", WORK)
def test_an_odd_folder_works(name, broken):
    folder = broken(WORK[name])
    chat, episodes = play(folder)
    assert len(episodes) == 6
    assert all(e.num_trained and e.stop_reason != StopReason.ENV_ERROR for e in episodes)
    assert 401 not in chat.reply_ids("x")[:1] and chat.reply_ids("x")
    for episode in episodes:
        # The end-of-turn token is trained whatever its id, and every prompt begins with the turns before it.
        for turn in episode.turns:
            assert set(episode.loss_mask[turn.start : turn.stop]) == {1}
        for turn, following in zip(episode.turns, episode.turns[1:]):
            between = episode.completion_ids[turn.stop : following.start]
            assert between == chat.reply_ids(turn.reply)
    assert not list(folder.parent.rglob(MARKER))


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_folder_is_refused_in_one_line_that_names_it(name, broken):
    change, reason = REFUSED[name]
    folder = broken(change)
    with pytest.raises(UsageError, match=reason) as error:
        play(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    assert not list(folder.parent.rglob(MARKER))


def test_the_marker_would_be_seen(broken):
    """The files above do what they say where somebody lets them."""
    folder = broken(lambda folder: None)
    exec(compile(CODE, str(folder / "code.py"), "exec"), {"__file__": str(folder / "code.py")})
    assert (folder / MARKER).is_file()
    (folder / MARKER).unlink()
    torch.save(Bomb(folder), folder / "bomb.bin")
    torch.load(folder / "bomb.bin", weights_only=False)
    assert (folder / MARKER).is_dir()


def test_the_command_line_says_it_in_one_line_with_exit_code_2(broken, monkeypatch, capsys):
    folder = broken(NO_EOS)
    monkeypatch.setattr(sys, "argv", ["eval.py", "--model", str(folder), "--limit", "1", "--device", "cpu"])
    with pytest.raises(SystemExit) as stop:
        run_entry(eval_script.main)
    assert stop.value.code == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("error: ") and error.count("\n") == 1 and str(folder) in error


def test_a_tokenizer_alone_is_as_careful(broken):
    folder = broken(WORK["code for its tokenizer"])
    load_tokenizer(str(folder))
    assert not list(folder.parent.rglob(MARKER))
    (folder / "tokenizer.json").write_text("[]")
    with pytest.raises(UsageError, match="tokenizer cannot be loaded") as error:
        load_tokenizer(str(folder))
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_an_id_that_the_tokenizer_does_not_have_spells_nothing():
    """Fast tokenizers leave it out, slow ones raise; the toy one is fast, so it is made to."""
    tokenizer = toy.make_tokenizer()
    chat = ChatTokens(tokenizer)
    decode, last = tokenizer.decode, len(tokenizer) - 1

    def slow(ids, **options):
        return decode([i if i <= last else [][i] for i in ids], **options)

    tokenizer.decode = slow
    hello = tokenizer.encode("hello")
    assert chat.decode_turn([*hello, last + 1, last + 50, *hello, tokenizer.eos_token_id]) == "hellohello"


def test_a_template_that_never_ends_is_interrupted(monkeypatch):
    monkeypatch.setattr("grpo.chat.RENDER_SECONDS", 0.2)
    nested = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(UsageError, match="no answer within 0.2 s"):
        ChatTokens(toy.make_tokenizer(nested + toy.CHAT_TEMPLATE))
