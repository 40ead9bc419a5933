"""The model card says what the run's files say, its snippet runs, and publishing sends what it should and no more."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, get_token, parse_eval_result_entries

from env.prompts import first_messages
from env.tools import ToolCall, parse_turn
from grpo import card, card_text, compare, run, run_folder
from grpo.config import Config, ModelConfig, parse
from grpo.console import run_entry
from grpo.files import write_atomic
from grpo.model import load_policy
from scenarios.generator import held_out
from tests import toy
from tests.hub_stand_in import TOKEN, Hub, serve
from tests.test_run import train_py

ROOT = Path(__file__).parent.parent
FLAGS = """--model tiny --recipe tiny --device cpu --beta 0.2 --num-steps 2 --prompts-per-step 1 --num-generations 2
    --max-completion-len 120 --eval-limit 4 --warmup-steps 0 --learning-rate 1e-3""".split()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.plots, "plot_run", lambda *args: None)
        assert train_py([*FLAGS, "--output-dir", str(folder)]) == 0
    return folder


@pytest.fixture
def finished(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "run"))


def card_py(monkeypatch, *args):
    """`python -m grpo.card ARGS` in this process; the exit code."""
    monkeypatch.setattr("sys.argv", ["card", *map(str, args)])
    try:
        run_entry(card.main)
    except SystemExit as exit_:
        return exit_.code
    return 0


def readme_of(folder):
    return folder / "final" / "README.md"


def readme(folder):
    return readme_of(folder).read_text()


def change_config(folder, **values):
    document = run_folder.stored(folder)
    document["config"] |= values
    write_atomic(folder / "config.json", json.dumps(document))


# ------------------------------------------------------------------------------------------------------------- content


def test_a_run_ends_with_a_card_whose_metadata_is_its_evaluation(original):
    after = compare.load_report(original / "eval_after.json")
    data = ModelCard.load(original / "final" / "README.md").data
    assert (data.language, data.license, data.library_name, data.pipeline_tag) == (
        "en", "apache-2.0", "transformers", "text-generation"
    )  # fmt: skip
    assert data.get("base_model") is None and data.model_name == "tiny-beta0.2-seed0" and "grpo" in data.tags
    found = {result.metric_type: result for result in data.eval_results}
    families = {family: row for family, row in after["families"].items() if row["n"]}
    assert set(found) == {"avg_score", "completion_rate", *(f"avg_score/{family}" for family in families)}
    assert found["avg_score"].metric_value == round(after["avg_score"], 4) and families
    assert found["avg_score"].metric_args == {
        "n": 4, "interval_95": [round(x, 4) for x in after["avg_score_interval"]]
    }  # fmt: skip
    assert found["completion_rate"].metric_value == round(after["completion_rate"], 4)
    for family, row in families.items():
        assert found[f"avg_score/{family}"].metric_value == round(row["mean"], 4)
        assert found[f"avg_score/{family}"].metric_args["n"] == row["n"]
    assert all(result.source_url is None for result in data.eval_results)  # it is published nowhere


def test_eval_results_hold_the_same_numbers(original):
    text = (original / "final" / ".eval_results" / "clarify.yaml").read_text()
    entries = parse_eval_result_entries(yaml.safe_load(text))
    found = {
        result.metric_type: result.metric_value for result in ModelCard.load(readme_of(original)).data.eval_results
    }
    assert {entry.task_id: entry.value for entry in entries} == found
    assert all(entry.dataset_id == card_text.DATASET and entry.notes.startswith("n=") for entry in entries)
    after = compare.load_report(original / "eval_after.json")
    assert after["scenarios"]["sha256"] in text and "95 % interval [" in text


def test_the_table_compares_base_and_trained(original):
    reports = [compare.load_report(original / f"eval_{when}.json") for when in ("before", "after")]
    row = compare.compare(reports)["rows"][-1]
    base, trained = row["models"]
    cells = [
        f"{each['mean']:.3f} [{each['interval'][0]:.3f}, {each['interval'][1]:.3f}]" for each in (base, trained)
    ] + [f"{trained['delta']:+.3f} [{trained['delta_interval'][0]:+.3f}, {trained['delta_interval'][1]:+.3f}]"]
    assert f"| **all** | 4 | {' | '.join(cells)} |" in readme(original)
    low, high = reports[1]["completion_interval"]
    assert f"{reports[1]['completion_rate']:.0%} [{low:.0%}, {high:.0%}] |" in readme(original)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([0.5, 0.4, 0.3, 0.2], "lies on one side of 0"),
        ([0.1, -0.1, 0.1, -0.1], "does not show that training changed the score"),
        ([0.1] * 4, "has no width and says nothing"),
    ],
)
def test_the_verdict_follows_from_the_interval(finished, changes, says):
    for name, deltas in (("eval_before", [0.0] * 4), ("eval_after", changes)):
        path = finished / f"{name}.json"
        report = json.loads(path.read_text())
        for episode, delta in zip(report["episodes"], deltas, strict=True):
            episode["scores"]["card"] = 0.4 + delta
        path.write_text(json.dumps(report))
    assert says in card.card(card.Run(finished))


def test_without_an_evaluation_it_claims_nothing(finished):
    for name in ("eval_before.json", "eval_after.json"):
        (finished / name).unlink()
    shutil.rmtree(finished / "final" / ".eval_results")
    assert card.write(card.Run(finished)) == [readme_of(finished)]
    text = readme(finished)
    assert "model-index" not in text and "There is no evaluation" in text and "model_name" not in text


def test_the_snippet_runs_and_plays_one_turn(original, capsys, monkeypatch):
    (code,) = [block.split("```")[0] for block in readme(original).split("```python\n")[1:]]
    monkeypatch.chdir(original / "final")
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert capsys.readouterr().out.strip() == scope["reply"].strip()
    chat = run.make_chat(load_policy(ModelConfig(device="cpu")))
    assert scope["inputs"]["input_ids"][0].tolist() == list(chat.first_prompt(first_messages(held_out(1)[0])))
    assert isinstance(parse_turn(scope["reply"]), ToolCall)


@pytest.mark.parametrize(
    "flags",
    [
        "--recipe tiny",
        "--recipe tiny --beta 0 --loss-type dapo --epsilon-high 0.3 --mask-truncated",
        "--recipe clarify-run4 --num-steps 7 --delta 3 --seed 5 --lora-rank 4",
    ],
)
def test_the_command_repeats_the_settings(finished, flags):
    settings = parse([*flags.split(), "--output-dir", "secret/place", "--report-to", "tensorboard"], {})
    change_config(finished, **json.loads(json.dumps(settings.flat())))
    command = card_text.command(card.Run(finished))
    assert "secret" not in command and command.startswith("python train.py --recipe ")
    repeated = parse(shlex.split(command)[2:], {}).flat()
    private = card_text.PRIVATE
    assert {k: v for k, v in repeated.items() if k not in private} == {
        k: v for k, v in settings.flat().items() if k not in private
    }
    assert set(private) <= set(Config().flat())


def test_a_base_on_the_hub_is_named_and_its_licence_only_where_it_is_known(finished):
    change_config(finished, model="Qwen/Qwen3-0.6B")
    text = card.card(card.Run(finished))
    assert "base_model: Qwen/Qwen3-0.6B\n" in text and "base_model_relation: finetune\n" in text
    assert "license: apache-2.0\n" in text and "# Qwen3-0.6B-beta0.2-seed0\n" in text
    change_config(finished, model="somebody/model")
    text = card.card(card.Run(finished))
    assert "base_model: somebody/model\n" in text and "\nlicense" not in text and "this card states none" in text


# ---------------------------------------------------------------------------------------------------- bit for bit, kept


def test_a_resumed_run_ends_with_the_same_card_wherever_it_lies(original, finished, monkeypatch):
    monkeypatch.setattr(run.plots, "plot_run", lambda *args: None)
    before = {name: (original / "final" / name).read_bytes() for name in ("README.md", ".eval_results/clarify.yaml")}
    shutil.rmtree(finished / "final")
    assert train_py(["--resume", str(finished)]) == 0
    assert {name: (finished / "final" / name).read_bytes() for name in before} == before


def test_a_card_that_was_edited_is_kept(finished, monkeypatch, capsys):
    path = finished / "final" / "README.md"
    assert not card.edited(path)
    text = path.read_text().replace("## Limits", "Mind the gap.\n\n## Limits")
    path.write_text(text)
    assert card_py(monkeypatch, finished) == 0
    assert "README.md: edited by hand, left as it is" in capsys.readouterr().out and path.read_text() == text
    monkeypatch.setattr(run.plots, "plot_run", lambda *args: None)
    assert train_py(["--resume", str(finished)]) == 0
    assert path.read_text() == text
    path.unlink()
    assert card_py(monkeypatch, finished) == 0
    assert "Mind the gap." not in path.read_text() and not card.edited(path)


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "args", "says"),
    [
        (None, ["{run}/nowhere"], "nowhere: not the folder of a run"),
        (None, ["{run}/final"], "final: not the folder of a run; give "),
        ("final", ["{run}"], "no trained model in it yet; python train.py --resume "),
        (None, ["{run}", "--push-to-hub", "name"], "--push-to-hub name: must be OWNER/NAME"),
        (None, ["{run}", "--push-to-hub", "a/b/c"], "--push-to-hub a/b/c: must be OWNER/NAME"),
        (None, ["{run}", "--push-to-hub", "a/b"], "--push-to-hub a/b: no token"),
        (None, ["{run}", "--dataset", "mine"], "--dataset mine: must be OWNER/NAME"),
        (None, ["{run}", "--pubic"], "--pubic"),
    ],
)
def test_bad_input_is_one_line(finished, monkeypatch, capsys, change, args, says):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    if change:
        shutil.rmtree(finished / change)
    assert card_py(monkeypatch, *(arg.format(run=finished) for arg in args)) == 2
    error = capsys.readouterr().err
    assert says in error and error.startswith("error: ") and error.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------- publishing


def push(folder, hub, *args, token=TOKEN):
    """In a process of its own, which finds the stand-in by its environment."""
    env = os.environ | {
        "HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder.parent / "hf")
    }  # fmt: skip
    command = [sys.executable, "-m", "grpo.card", str(folder), "--push-to-hub", "me/asks-first", *args]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_what_is_pushed(tmp_path, monkeypatch):
    """A run from a local folder, with adapters: nothing that is uploaded names where it lay."""
    pytest.importorskip("peft", reason='peft is not installed (pip install -e ".[lora]")')
    monkeypatch.setattr(run.plots, "plot_run", lambda *args: None)
    base = tmp_path / "secret" / "base"
    tokenizer = toy.make_tokenizer()
    toy.make_model(tokenizer).save_pretrained(base)
    tokenizer.save_pretrained(base)
    folder = tmp_path / "secret" / "run"
    flags = ["--model", str(base), "--lora-rank", "2", "--eval-limit", "1", "--max-completion-len", "24"]
    assert train_py([*FLAGS, *flags, "--output-dir", str(folder)]) == 0
    with serve(Hub()) as hub:
        done = push(folder, hub, "--private", "--dataset", "me/scenarios")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{hub.url}/me/asks-first"
    assert hub.repos["me/asks-first"]["visibility"] == "private" and hub.commits == 1
    final = folder / "final"
    there = {path.relative_to(final).as_posix() for path in final.rglob("*") if path.is_file()}
    assert set(hub.files) == there | {"eval_before.json", "eval_after.json"}
    assert {"adapter/adapter_model.safetensors", ".eval_results/clarify.yaml", "chat_template.jinja"} <= there
    assert hub.lfs == {"model.safetensors", "adapter/adapter_model.safetensors"}
    for name in there - {"README.md", ".eval_results/clarify.yaml", "adapter/adapter_config.json"}:
        assert hub.files[name] == (final / name).read_bytes(), name
    assert [name for name, content in hub.files.items() if b"secret" in content] == []
    assert json.loads(hub.files["adapter/adapter_config.json"])["base_model_name_or_path"] == "base"
    text = hub.files["README.md"].decode()
    data = ModelCard(text).data
    assert data.model_name == "asks-first" and 'MODEL = "me/asks-first"\n' in text and "license" not in text[:300]
    url = "https://huggingface.co/me/asks-first/blob/main/eval_after.json"
    assert {result.source_url for result in data.eval_results} == {url}
    entries = parse_eval_result_entries(yaml.safe_load(hub.files[".eval_results/clarify.yaml"]))
    assert {(entry.dataset_id, entry.source_url) for entry in entries} == {("me/scenarios", url)}
    assert json.loads(hub.files["eval_after.json"])["model"] == "me/asks-first"
    assert 'MODEL = "."' in readme(folder)  # the one here stays as it was


@pytest.fixture
def endpoint(monkeypatch):
    """The same in this process, which is quicker."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    return lambda url: monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)


def test_a_card_that_was_edited_is_what_is_pushed(finished, monkeypatch, endpoint):
    path = finished / "final" / "README.md"
    path.write_text(path.read_text().replace("## Limits", "Mind the gap.\n\n## Limits"))
    with serve(Hub()) as hub:
        endpoint(hub.url)
        assert card_py(monkeypatch, finished, "--push-to-hub", "me/asks-first") == 0
    assert hub.files["README.md"] == path.read_bytes() and "visibility" not in hub.repos["me/asks-first"]


@pytest.mark.parametrize(
    ("refuse", "token", "says"), [(0, "hf_wrong", "401"), (403, TOKEN, "403"), (None, TOKEN, "onnect")]
)
def test_a_failure_of_the_hub_is_one_line(finished, monkeypatch, capsys, endpoint, refuse, token, says):
    monkeypatch.setenv("HF_TOKEN", token)
    assert get_token() == token
    with serve(Hub(refuse or 0)) as hub:
        endpoint("http://127.0.0.1:9" if refuse is None else hub.url)
        assert card_py(monkeypatch, finished, "--push-to-hub", "me/asks-first") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --push-to-hub me/asks-first: ") and says in error and error.count("\n") == 1
    assert hub.commits == 0
