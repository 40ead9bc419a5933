"""A whole run on a toy model: what its folder holds, that it repeats, resumes, and refuses before it writes."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from grpo import checkpoint, run
from grpo.config import Config, ModelConfig
from grpo.console import run_entry
from grpo.metrics import without_times
from grpo.model import load_policy
from grpo.trainer import Trainer
from tests import toy
from tests.test_trainer import spread_rewards

FLAGS = dict(
    beta=0.2, device="cpu", num_steps=4, prompts_per_step=2, num_generations=3, max_completion_len=24, eval_limit=5,
    save_every=2, learning_rate=1e-3, warmup_steps=1, num_iterations=2,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def rewards_with_spread():
    """The toy model earns nothing; without a spread of rewards no weight would move and most tests would be empty."""
    original = Trainer.sample_groups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "sample_groups", lambda self, step: spread_rewards(original(self, step)))
        yield


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model_folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("toy")
    tokenizer = toy.make_tokenizer()
    toy.make_model(tokenizer, tie_word_embeddings=request.param).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def arguments(model_folder, output, **changes):
    values = FLAGS | {"model": model_folder, "output_dir": output} | changes
    return [word for name, value in values.items() for word in ("--" + name.replace("_", "-"), str(value))]


def train_py(args):
    """`train.py ARGS` in this process; returns the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py", *args])
        try:
            run_entry(train.main)
        except SystemExit as exit_:
            return exit_.code
    return 0


@pytest.fixture(scope="module")
def finished(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert train_py(arguments(model_folder, folder)) == 0
    return folder


def history(folder):
    return json.loads((folder / "log_history.json").read_text())


def test_the_folder_holds_everything(finished):
    stored = json.loads((finished / "config.json").read_text())
    assert set(stored["config"]) == set(Config().flat()) and stored["versions"]["torch"] == torch.__version__
    assert [row["step"] for row in history(finished)] == [1, 2, 3, 4]
    assert [row["learning_rate"] for row in history(finished)][0] == 0.0  # the rate used, not the next one
    for name in ("eval_before.json", "eval_after.json"):
        report = json.loads((finished / name).read_text())
        assert report["n"] == 5 and "greedy" in report
    assert len(list((finished / "completions").glob("*.md"))) == 4
    plots = {path.name for path in (finished / "plots").glob("*.png")}
    assert {"reward.png", "kl.png", "entropy.png", "stop_reasons.png", "families.png"} <= plots
    assert [path.name for path in checkpoint.finished(finished)] == ["step-000002", "step-000004"]
    assert sorted(path.name for path in (finished / "rollouts").iterdir()) == [
        "step-000002.json.gz", "step-000003.json.gz", "step-000004.json.gz"
    ]  # fmt: skip


def test_final_loads_with_transformers_and_with_our_loader_to_equal_logits(finished, model_folder):
    ours = load_policy(ModelConfig(model=str(finished / "final"), device="cpu")).model
    theirs = AutoModelForCausalLM.from_pretrained(finished / "final", dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    ids = torch.arange(5, 30)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
        assert not torch.equal(ours(ids).logits, base(ids).logits)  # it is the trained model
    tied = base.config.tie_word_embeddings
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == tied
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in base.parameters())
    assert AutoTokenizer.from_pretrained(finished / "final").chat_template == toy.make_tokenizer().chat_template


def test_the_same_seed_gives_the_same_log(finished, model_folder, tmp_path):
    assert train_py(arguments(model_folder, tmp_path / "again", eval_limit=0)) == 0
    assert without_times(history(tmp_path / "again")) == without_times(history(finished))
    assert train_py(arguments(model_folder, tmp_path / "other", eval_limit=0, seed=1)) == 0
    assert without_times(history(tmp_path / "other")) != without_times(history(finished))


def test_a_resumed_run_equals_an_uninterrupted_one(finished, model_folder, tmp_path, monkeypatch):
    """Killed after step 3, one step past its newest checkpoint."""
    folder = tmp_path / "run"
    steps = run.step_metrics

    def dies(groups, *, step, **kwargs):
        if step == 4:
            raise KeyboardInterrupt
        return steps(groups, step=step, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(run, "step_metrics", dies)
        assert train_py(arguments(model_folder, folder, eval_limit=0)) == 130
    assert len(history(folder)) == 3 and not (folder / "final").exists()
    assert train_py(["--resume", str(folder)]) == 0
    assert without_times(history(folder)) == without_times(history(finished))
    weights = "final/model.safetensors"
    assert (folder / weights).read_bytes() == (finished / weights).read_bytes()


def test_resume_refuses_a_changed_setting_by_name(finished, capsys):
    before = history(finished)
    assert train_py(["--resume", str(finished), "--beta", "0.3"]) == 2
    error = capsys.readouterr().err
    assert "--beta 0.3" in error and "0.2" in error and error.count("\n") == 1
    assert history(finished) == before


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (dict(num_generations=1), "--num-generations 1"),
        (dict(beta=-1), "--beta -1"),
        (dict(model="missing/model/folder"), "--model missing/model/folder"),
        (dict(recipe="fastest"), "--recipe fastest"),
        (dict(resume="nowhere"), "--resume nowhere"),
        (dict(resume=""), "--resume"),
        (dict(output_dir="/proc/run"), "--output-dir /proc/run"),
        (dict(output_dir="x" * 300), "--output-dir"),
        (dict(output_dir=__file__ + "/sub"), "--output-dir"),
        (dict(eval_limit=100_000), "--eval-limit 100000"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_and_writes_nothing(model_folder, tmp_path, capsys, changes, names):
    assert train_py(arguments(model_folder, tmp_path / "run", **changes)) == 2
    error = capsys.readouterr().err
    assert names in error and error.startswith("error: ") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_another_run_s_folder_is_left_alone(finished, model_folder, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert train_py(arguments(model_folder, copy, beta=0.1)) == 2
    assert f"--output-dir {copy}: holds another run" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_without_output_dir_a_free_name_is_taken(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = arguments(model_folder, "", eval_limit=0, num_steps=1)
    args = args[: args.index("--output-dir")] + args[args.index("--output-dir") + 2 :]
    assert train_py(args) == 0 and train_py(args) == 0
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == [f"{model_folder.name}-beta0.2-seed0", f"{model_folder.name}-beta0.2-seed0-2"]


@pytest.mark.parametrize("content", ['{"config": {}}', '{"config": null}', "[]", '{"config": {"beta": null}}', "\xff"])
def test_a_damaged_config_is_named(finished, tmp_path, capsys, content):
    copy = shutil.copytree(finished, tmp_path / "copy")
    (copy / "config.json").write_bytes(content.encode("latin-1"))
    assert train_py(["--resume", str(copy)]) == 2
    error = capsys.readouterr().err
    assert "config.json" in error and error.count("\n") == 1


def test_resume_refuses_another_base(finished, tmp_path, capsys):
    """The folder that `--model` names holds other weights now: the policy would go on with a wrong reference."""
    copy = shutil.copytree(finished, tmp_path / "copy")
    stored = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(stored | {"base_sha256": "0" * 64}))
    assert train_py(["--resume", str(copy)]) == 2
    assert "base model has changed" in capsys.readouterr().err


def test_a_context_shorter_than_the_prompt_is_refused(tmp_path, capsys):
    tokenizer = toy.make_tokenizer()
    toy.make_model(tokenizer, max_position_embeddings=64).save_pretrained(tmp_path / "short")
    tokenizer.save_pretrained(tmp_path / "short")
    assert train_py(arguments(tmp_path / "short", tmp_path / "run")) == 2
    assert "64 positions are too few" in capsys.readouterr().err and not (tmp_path / "run").exists()
