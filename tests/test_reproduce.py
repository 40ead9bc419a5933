"""`python -m grpo.reproduce`: what is left to do, and what the report says of made-up runs."""

import json
import re
import shutil
import sys

import pytest
from matplotlib.image import imread

from grpo import run_folder
from grpo.config import Config, UsageError
from grpo.console import run_entry
from grpo.evaluate import evaluate_policy
from grpo.reproduce import __main__ as command
from grpo.reproduce import plan, processes, report, results
from scenarios.generator import held_out
from tests.test_compare import made_report
from tests.test_reproduce_processes import chain

LIMIT = 10
FLAGS = ["--num-steps", "3", "--eval-limit", str(LIMIT)]


def reproduce(tmp_path, *flags, capsys=None):
    """`python -m grpo.reproduce FLAGS` in this process, with its folders in tmp_path; (exit code, stderr)."""
    folders = ["--runs-dir", str(tmp_path / "runs"), "--output-dir", str(tmp_path / "results")]
    code = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["reproduce", *FLAGS, *folders, *flags])
        try:
            run_entry(command.main)
        except SystemExit as stop:
            code = stop.code
    return code, capsys.readouterr().err if capsys else ""


def planned(tmp_path, *flags):
    """The runs of the only model, and every chain."""
    args, extra = plan.parse([*FLAGS, "--runs-dir", str(tmp_path / "runs"), *flags])
    runs = plan.make_runs(args, extra)
    return next(iter(runs.values())), plan.make_chains(args, runs)


def made_evaluation(settings: Config, policy: str, gain: float = 0.0) -> dict:
    """What eval.py would write of a scripted policy, with `gain` added to every score."""
    made = evaluate_policy(policy, held_out(LIMIT), rubric=settings.eval.rubric)
    for row in made["episodes"]:
        row["scores"] = {rubric: score + gain for rubric, score in row["scores"].items()}
        row["conversation"] = None
    sampling = {
        "temperature": settings.eval.eval_temperature,
        "max_completion_len": settings.rollout.max_completion_len,
    }
    return made | sampling | {"greedy": {"avg_score": 0.25 + gain}}


def log_row(step: int, beta: float, seed: int) -> dict:
    return {"step": step, "reward": 0.1 * step + 0.01 * seed, "kl": 0.002 * step if beta else None, "step_time": 2.0}


def finish(run: plan.Run, gain: float, kl: float) -> None:
    """Make a finished run of it."""
    settings = run.settings
    beta, seed = settings.loss.beta, settings.run.seed
    run.folder.mkdir(parents=True)
    machine = {"device": "cpu", "dtype": "torch.float32", "threads": 1}
    run_folder.create(run.folder, settings, "base", machine)
    rows = ",\n".join(json.dumps(log_row(step, beta, seed)) for step in range(1, settings.optim.num_steps + 1))
    (run.folder / "log_history.json").write_text(f"[\n{rows}\n]\n")
    (run.folder / "final").mkdir()
    (run.folder / "final" / "config.json").write_text("{}")
    run_folder.write_json(run.evaluation, made_evaluation(settings, "guess", gain))
    run_folder.write_json(run.divergence, {"kl": kl})


GAINS = {(0.0, 0): 0.30, (0.0, 1): 0.31, (0.0, 2): 0.32, (0.2, 0): 0.20, (0.2, 1): 0.28, (0.2, 2): 0.40}
KLS = {(0.0, 0): 0.070, (0.0, 1): 0.080, (0.0, 2): 0.075, (0.2, 0): 0.016, (0.2, 1): 0.018, (0.2, 2): 0.017}


@pytest.fixture
def finished(tmp_path):
    """Three seeds of two betas on disk, by numbers that are known. The base is the same policy without any gain."""
    runs, _ = planned(tmp_path)
    for run in runs:
        key = run.settings.loss.beta, run.settings.run.seed
        finish(run, GAINS[key], KLS[key])
    base = made_evaluation(runs[0].settings, "guess") | {"model": "tiny"}
    run_folder.write_json(tmp_path / "runs" / f"tiny-base-{LIMIT}.json", base)
    return tmp_path


@pytest.fixture
def nothing_starts(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(processes, "begin", refuse)


# ------------------------------------------------------------------------------------------------------------- the plan


def test_a_first_start_trains_evaluates_and_measures_everything_once(tmp_path):
    runs, chains = planned(tmp_path, "--learning-rate", "0.002")
    names = [f"tiny-beta{beta}-seed{seed}" for seed in (0, 1, 2) for beta in ("0", "0.2")]
    assert [chain.name for chain in chains] == ["tiny base", *names]
    base, first = chains[0], chains[1]
    assert [stage.label for stage in base.stages] == ["evaluation"]
    assert [stage.label for stage in first.stages] == ["training", "evaluation", "KL to the base"]
    train, evaluate, divergence = (" ".join(stage.command) for stage in first.stages)
    folder = tmp_path / "runs" / "tiny-beta0-seed0"
    assert "--learning-rate 0.002" in train and f"--beta 0.0 --eval-limit 0 --seed 0 --output-dir {folder}" in train
    assert f"--model {folder}/final --limit {LIMIT}" in evaluate and "--temperature 0.7" in evaluate
    assert f"{folder}/final --base tiny --limit {LIMIT}" in divergence
    assert runs[0].settings.optim.learning_rate == 0.002
    assert not (tmp_path / "runs").exists()


def test_what_is_done_is_kept_and_what_was_stopped_goes_on(finished):
    runs, chains = planned(finished)
    assert [chain.stages for chain in chains] == [[]] * 7
    shutil.rmtree(runs[0].folder / "final")  # killed before it ended ...
    runs[1].divergence.unlink()
    _, chains = planned(finished)
    stopped, measured = chains[1], chains[2]
    assert [stage.label for stage in stopped.stages] == ["training (goes on)"]  # its evaluation is there still
    words = stopped.stages[0].command
    assert words[words.index("--resume") + 1] == str(runs[0].folder) and "--output-dir" not in words
    assert [stage.label for stage in measured.stages] == ["KL to the base"]
    assert not any(chain.stages for chain in chains[3:])


def test_other_scenarios_are_evaluated_anew_without_training_again(finished):
    _, chains = planned(finished, "--eval-limit", "20")
    assert [[stage.label for stage in chain.stages] for chain in chains] == [["evaluation"]] + [
        ["evaluation", "KL to the base"]
    ] * 6


def test_changed_settings_are_refused_by_name(finished, capsys, nothing_starts):
    code, err = reproduce(finished, "--learning-rate", "0.5", capsys=capsys)
    assert code == 2 and "tiny-beta0-seed0: --learning-rate 0.5: the run was started with 0.0001" in err
    assert not (finished / "results").exists()


def test_an_evaluation_of_other_settings_is_refused(finished):
    path = finished / "runs" / f"tiny-base-{LIMIT}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.1}))
    with pytest.raises(UsageError, match=rf"tiny-base-{LIMIT}.json: not of this run \(temperature 0.1"):
        planned(finished)


def test_the_base_of_another_model_is_refused(finished, capsys, nothing_starts):
    path = finished / "runs" / f"tiny-base-{LIMIT}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": "elsewhere/tiny"}))
    code, err = reproduce(finished, capsys=capsys)
    assert code == 2 and f"tiny-base-{LIMIT}.json: not of --models tiny" in err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--model", "x"], "--model: this command runs several; give --models"),
        (["--beta=0.1"], "--beta: this command runs several; give --betas"),
        (["--seed", "3"], "--seed: .*--seeds"),
        (["--resume", "x"], "--resume: not needed"),
        (["--seeds", "1", "1"], "--seeds 1 1: must be one or more, each once"),
        (["--betas"], "--betas"),
        (["--betas", "0.12345678", "0.12345679"], "--betas 0.12345678 0.12345679: must be"),
        (["--betas", "-1"], "--beta -1.0: must be 0 or more"),
        (["--models", "a/x", "b/x"], "--models a/x b/x: must end in different names"),
        (["--eval-limit", "251"], "--eval-limit 251: must be from 1 to 250"),
        (["--jobs", "-1"], "--jobs -1"),
        (["--seeds", "0", "-1"], "--seed -1: must be 0 or more"),
        (["--beats", "0"], "--beats"),
        (["--num-steps", "-1"], "--num-steps -1"),
    ],
)
def test_bad_flags_are_named(tmp_path, capsys, nothing_starts, flags, message):
    code, err = reproduce(tmp_path, *flags, capsys=capsys)
    assert code == 2 and len(err.splitlines()) == 1 and list(tmp_path.iterdir()) == []
    assert re.search(message, err), err


def test_a_beta_from_the_environment_is_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("BETA", "0.1")
    with pytest.raises(UsageError, match="BETA=0.1: .*--betas"):
        planned(tmp_path)


def test_several_models_are_one_flag(tmp_path):
    args, extra = plan.parse([*FLAGS, "--models", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "--recipe", "clarify-run4"])
    runs = plan.make_runs(args, extra)
    assert list(runs) == ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B"]
    settings = runs["Qwen/Qwen3-4B"][1].settings
    assert (settings.model.model, settings.loss.beta, settings.eval.rubric) == ("Qwen/Qwen3-4B", 0.2, "gated")
    assert plan.side_by_side(args, runs) == (1, 0)  # large models do not share a machine


# ----------------------------------------------------------------------------------------------------------- the report


def test_the_report_of_made_up_runs(finished, nothing_starts, capsys):
    assert reproduce(finished) == (0, "")
    out = finished / "results"
    text, numbers = (out / "report.md").read_text(), json.loads((out / "report.json").read_text())
    found = numbers["results"][0]
    told = {(v["name"], v["against"], v["measure"]): v for v in found["verdicts"]}
    change = told["beta 0", "base", "score"]
    assert change["change"] == pytest.approx(0.31) and change["by_seed"] == pytest.approx([0.30, 0.31, 0.32])
    assert change["verdict"] == "better" and change["interval"] == pytest.approx([0.285, 0.335], abs=2e-3)  # 4.303 s/√3
    anchored = told["beta 0.2", "beta 0", "score"]
    assert anchored["by_seed"] == pytest.approx([-0.10, -0.03, 0.08]) and anchored["verdict"] == "cannot be told"
    kl = told["beta 0.2", "beta 0", "KL"]
    assert kl["change"] == pytest.approx(-0.058) and kl["verdict"] == "closer to the base"
    assert "beta 0.2 against beta 0: KL to the base, nats per token | -0.0580 | [" in text
    assert "| 0.053 |" not in text and "**cannot be told**" in text and "**better**" in text
    base = found["comparisons"]["card"]["rows"][-1]["models"][0]["mean"]
    assert f"| **average score** | **{base:.3f}** | **{base + 0.31:.3f} ± 0.010** |" in text
    assert "| greedy | 0.250 | 0.560 ± 0.010 |" in text
    assert "training reward, last 20 steps | - | 0.210 ± 0.010" in text
    assert "[0.10, 0.31]" in text and "[0.07, 0.26]" in text  # published: 9/50 and 7/50
    assert "within noise of each other" in text and "threads 1" in text and "Training took 6 s a run" in text
    assert text.count("\n| tiny, beta") == 6 and "None" not in text and "nan" not in text
    plots = sorted(out.glob("*.png"))
    assert [path.name for path in plots] == [f"tiny-{n}.png" for n in ("deltas", "families", "kl", "reward")]
    assert all(f"({path.name})" in text and (imread(path)[..., :3].min(axis=-1) < 0.9).mean() > 0.005 for path in plots)
    assert sum(path.stat().st_size for path in out.iterdir()) < 500_000
    assert "beta 0.2 against beta 0: average score (card)" in capsys.readouterr().out


def test_a_failed_run_is_missing_in_the_report_and_named(finished, monkeypatch, capsys):
    runs, chains = planned(finished)
    shutil.rmtree(runs[0].folder)
    chains[1] = chain(finished, "tiny-beta0-seed0", "raise SystemExit('error: it broke')")
    monkeypatch.setattr(plan, "make_chains", lambda args, runs: chains)
    code, err = reproduce(finished, capsys=capsys)
    assert code == 1 and "1 of 7 failed: tiny-beta0-seed0 (reasons above)" in err
    text = (finished / "results" / "report.md").read_text()
    assert "**Failed, and missing here:**" in text and "error: it broke" in text
    assert "5 training runs" in text and text.count("\n| tiny, beta") == 5
    told = json.loads((finished / "results" / "report.json").read_text())["results"][0]["verdicts"]
    pair = next(v for v in told if v["against"] == "beta 0" and v["measure"] == "score")
    assert pair["seeds"] == [1, 2] and pair["by_seed"] == pytest.approx([-0.03, 0.08])  # the same seeds only


def test_one_seed_is_not_enough_for_a_verdict(finished, nothing_starts):
    assert reproduce(finished, "--seeds", "1")[0] == 0
    text = (finished / "results" / "report.md").read_text()
    assert "beta 0 and 0.2, seed 1, base `tiny`;" in text
    assert "One seed shows what one run does" in text and "**better**" not in text and " ± " not in text.split("##")[3]


def test_a_report_of_other_settings_is_not_replaced(finished, capsys, nothing_starts, monkeypatch):
    monkeypatch.setattr(report, "draw", lambda folder, found: None)
    assert reproduce(finished, "--seeds", "0", "1")[0] == 0
    assert reproduce(finished)[0] == 0  # more of the same
    old = (finished / "results" / "report.md").read_text()
    capsys.readouterr()
    code, err = reproduce(finished, "--seeds", "0", "1", capsys=capsys)
    assert code == 2 and "its report has --seeds 2 as well; give another folder, or --overwrite" in err
    elsewhere = ["--runs-dir", str(finished / "other")]
    code, err = reproduce(finished, *elsewhere, "--num-steps", "4", capsys=capsys)
    assert code == 2 and "its report is of --num-steps 3, not 4" in err
    assert (finished / "results" / "report.md").read_text() == old and not (finished / "other").exists()
    assert reproduce(finished, "--seeds", "0", "1", "--overwrite")[0] == 0
    (finished / "results" / "report.json").write_text("{}")
    code, err = reproduce(finished, capsys=capsys)
    assert code == 2 and "holds something else" in err


def test_a_small_learning_rate_is_the_same_one_in_the_next_call(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "text", lambda numbers: "")
    small, other = (Config().with_values({"learning_rate": lr}) for lr in (5e-7, 1e-6))
    about = {"models": ["a"], "betas": [1e-7, 0.2], "seeds": [0], "eval_limit": 50}
    report.write_report(tmp_path, about | {"settings": results.public(small), "results": []})
    report.check_replaceable(tmp_path, about | {"settings": small}, overwrite=False)
    with pytest.raises(UsageError, match="its report is of --learning-rate 5e-07, not 1e-06"):
        report.check_replaceable(tmp_path, about | {"settings": other}, overwrite=False)


def test_runs_of_another_base_are_not_mixed(finished, capsys, nothing_starts):
    path = finished / "runs" / "tiny-beta0-seed1" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_sha256": "other"}))
    code, err = reproduce(finished, capsys=capsys)
    assert code == 2 and "--models tiny: the runs started from different bases" in err


def test_several_models_share_a_report(finished):
    runs, _ = planned(finished)
    about = {"settings": runs[0].settings, "eval_limit": LIMIT, "models": ["tiny", "Qwen/Qwen3-1.7B"],
             "betas": [0.0, 0.2], "seeds": [0, 1, 2], "command": ["reproduce"]}  # fmt: skip
    base = finished / "runs" / f"tiny-base-{LIMIT}.json"
    found = [results.Result(model, base, runs) for model in about["models"]]
    numbers = results.numbers_of([*found, results.Result("gone", base, [])], about, {})
    text = report.text(numbers)
    assert "12 training runs" in text and "base `tiny` and `Qwen/Qwen3-1.7B`" in text
    assert text.count("## tiny\n") == text.count("## Qwen3-1.7B\n") == 1 and "gone" not in text
    assert text.count("| Qwen3-1.7B | beta 0.2 against beta 0") == 2 and "(Qwen3-1.7B-deltas.png)" in text
    assert "- Qwen3-1.7B (a published base): beta 0 against base: better" in text
    assert "- tiny (another base than the published ones" in text


def test_verdicts_pair_betas_by_training_seed():
    def condition(name, beta, seeds, kl):
        return {"name": name, "beta": beta, "seeds": seeds, "kl": kl}

    conditions = [condition("base", None, [], [0.0]), condition("beta 0", 0.0, [0, 1, 2], [0.10, 0.20, 0.30]),
                  condition("beta 0.2", 0.2, [1, 2, 3], [0.05, 0.15, 9.0])]  # fmt: skip
    of = lambda *means: [made_report([x] * 6) for x in means]  # noqa: E731
    told = results.verdicts(conditions, [of(0.1), of(0.2, 0.3, 0.4), of(0.1, 0.2, 0.9)], "card")
    pairs = [(v["name"], v["against"], v["measure"]) for v in told]
    assert pairs == [("beta 0", "base", "score"), ("beta 0.2", "base", "score"), ("beta 0.2", "beta 0", "score"),
                     ("beta 0.2", "beta 0", "KL")]  # fmt: skip
    assert told[0]["by_seed"] == pytest.approx([0.1, 0.2, 0.3]) and told[1]["seeds"] == [1, 2, 3]
    assert told[2]["seeds"] == [1, 2] and told[2]["by_seed"] == pytest.approx([-0.2, -0.2])
    assert told[2]["verdict"] == "worse"  # no spread between the seeds at all
    assert told[3]["by_seed"] == pytest.approx([-0.15, -0.15]) and told[3]["verdict"] == "closer to the base"


def test_the_published_models_are_within_noise_of_each_other():
    published = results._published()
    assert published["rows"]["Qwen3-1.7B, base"]["completion_interval"] == pytest.approx([0.0977, 0.3080], abs=1e-4)
    assert published["rows"]["run 4: 1.7B, beta 0.2"]["completion_interval"] == pytest.approx(
        [0.0695, 0.2619], abs=1e-4
    )
    assert {change["verdict"] for change in published["changes"]} == {"cannot be told"}
    text = report._published_section({"published": published, "results": []})
    assert "every interval of a change holds 0" in text
    published["changes"][0]["verdict"] = "better"
    assert "1 of 4 published differences" in report._published_section({"published": published, "results": []})


# -------------------------------------------------------------------------------------------------------- all of it


def test_a_real_ablation_end_to_end_and_again(tmp_path, capsys):
    flags = ["--num-steps", "1", "--eval-limit", "2", "--seeds", "5", "--betas", "0.2", "--prompts-per-step", "1",
             "--num-generations", "2", "--jobs", "2"]  # fmt: skip
    assert reproduce(tmp_path, *flags, capsys=capsys) == (0, "")
    run = tmp_path / "runs" / "tiny-beta0.2-seed5"
    evaluation = json.loads((run / "evaluation-2.json").read_text())
    assert evaluation["model"] == str(run / "final") and evaluation["n"] == 2 and "greedy" in evaluation
    numbers = json.loads((tmp_path / "results" / "report.json").read_text())
    found = numbers["results"][0]
    assert [run["steps"] for run in found["runs"]] == [1] and found["runs"][0]["machine"]["threads"] == 1
    assert found["conditions"][1]["kl"][0] == pytest.approx(0, abs=1e-3) and not numbers["failed"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "begin", None)
        assert reproduce(tmp_path, *flags)[0] == 0
