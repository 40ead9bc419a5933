"""`python eval.py`: what it accepts, what it writes, and how it says no."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import toy

import eval as eval_script
from env.families import FAMILIES
from grpo import files
from grpo.config import Config

ROOT = Path(__file__).parent.parent

PUBLISHED = [
    {
        "family": "coding_requirements", "task_id": task_id, "task_title": "Mild Ambiguity", "request": "Build an API.",
        "hidden_profile": {"stack": "go+gin", "scale": "small"}, "critical_fields": ["scale", "stack"],
        "required_keys": ["stack", "scale", "auth", "datastore"], "field_keys": ["scale", "stack"],
        "max_steps": 8, "max_questions": 6, "seed": 10_000 + seed,
    }
    for task_id in ("easy", "medium", "hard") for seed in range(2)
]  # fmt: skip
"""The schema of the published file: another name for coding, required keys that the profile lacks."""


@pytest.fixture
def published(tmp_path) -> Path:
    path = tmp_path / "published.json"
    path.write_text(json.dumps(PUBLISHED))
    return path


def test_report_as_table_and_as_json(run_eval, tmp_path):
    output = tmp_path / "ask.json"
    code, out, _ = run_eval("--model", "ask-all", "--limit", 10, "--output", output)
    assert code == 0 and str(output) in out and all(family in out for family in FAMILIES)
    report = json.loads(output.read_text(), parse_constant=pytest.fail)
    assert (report["model"], report["n"], report["rubric"]) == ("ask-all", 10, "card")
    assert report["scenarios"]["file"] == "held_out.json" and len(report["scenarios"]["file_sha256"]) == 64
    assert report["versions"]["torch"] and len(report["episodes"]) == 10
    talk = report["episodes"][0]["conversation"]
    assert [message["role"] for message in talk[:3]] == ["user", "assistant", "tool"]
    assert f"{report['avg_score']:.3f}" in out


def test_defaults_are_fifty_scenarios_ten_per_family(run_eval, tmp_path):
    run_eval("--model", "guess", "--output", tmp_path / "a.json")
    families = json.loads((tmp_path / "a.json").read_text())["families"]
    assert {family: row["n"] for family, row in families.items()} == dict.fromkeys(FAMILIES, 10)
    run_eval("--model", "guess", "--full", "--output", tmp_path / "b.json")
    assert json.loads((tmp_path / "b.json").read_text())["n"] == 250


def test_published_schema_is_playable_and_fair(run_eval, tmp_path, published):
    code, _, _ = run_eval("--model", "ask-all", "--scenarios", published, "--output", tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    assert code == 0 and report["n"] == 6 and report["scenarios"]["file"] == "published.json"
    assert report["families"]["coding"]["n"] == 6 and report["families"]["medical_intake"]["n"] == 0
    assert report["format_pass_rate"] == 1  # an honest plan passes although the file requires fields nobody has
    run_eval("--model", "ask-all", "--scenarios", published, "--limit", 3, "--output", tmp_path / "three.json")
    rows = json.loads((tmp_path / "three.json").read_text())["episodes"]
    assert sorted(row["task_id"] for row in rows) == ["easy", "hard", "medium"]


def test_rubric_decides_what_is_averaged(run_eval, tmp_path):
    for rubric in ("card", "gated"):
        run_eval("--model", "ask-all", "--rubric", rubric, "--limit", 10, "--output", tmp_path / f"{rubric}.json")
    card, gated = (json.loads((tmp_path / f"{rubric}.json").read_text()) for rubric in ("card", "gated"))
    assert card["avg_score"] != gated["avg_score"]
    assert card["avg_score"] == card["rubrics"]["card"]["avg_score"] == gated["rubrics"]["card"]["avg_score"]
    assert gated["avg_score"] == gated["rubrics"]["gated"]["avg_score"]


def test_compare_prints_changes_and_draws_them(run_eval, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # tables wrap at the width that a terminal announces
    for model in ("guess", "random", "ask-all"):
        run_eval("--model", model, "--limit", 20, "--output", tmp_path / f"{model}.json")
    files = [tmp_path / f"{model}.json" for model in ("guess", "random", "ask-all")]
    code, out, _ = run_eval("--compare", *files)
    means = [json.loads(path.read_text())["avg_score"] for path in files]
    assert code == 0 and f"{means[2] - means[0]:+.3f} [" in out and f"{means[1] - means[0]:+.3f} [" in out
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert run_eval("--compare", *files[:2], "--plot", tmp_path / "my.png")[0] == 0 and (tmp_path / "my.png").exists()
    code, _, err = run_eval("--compare", *files[:2], "--plot", tmp_path / "my.png")
    assert code == 2 and "my.png: exists" in err


def test_a_model_folder_is_played_and_reported_greedy_too(run_eval, tmp_path):
    tokenizer = toy.make_tokenizer()
    toy.make_model(tokenizer).save_pretrained(tmp_path / "toy")
    tokenizer.save_pretrained(tmp_path / "toy")
    options = ["--model", tmp_path / "toy", "--limit", 2, "--max-completion-len", 12, "--also-greedy"]
    code, out, err = run_eval(*options, "--output", tmp_path / "toy.json")
    assert code == 0, err
    report = json.loads((tmp_path / "toy.json").read_text())
    assert (report["n"], report["temperature"], report["greedy"]["temperature"]) == (2, 0.7, 0.0)
    assert report["max_completion_len"] == 12 and report["truncation_rate"] == 1
    assert "temperature 0.7" in out and "greedy" in out and "4/4 after" in out


def test_a_run_is_evaluated_with_its_own_episode_length(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"config": Config().with_values({"max_completion_len": 123}).flat()})
    )
    assert eval_script.default_length(str(tmp_path / "final")) == 123
    assert eval_script.default_length("tiny") == 320 and eval_script.default_length("Qwen/Qwen3-0.6B") == 768


def test_the_report_is_written_before_it_is_printed(run_eval, tmp_path, monkeypatch):
    """Standard output may be closed by then."""

    def closed(report):
        raise RuntimeError

    monkeypatch.setattr(eval_script, "print_report", closed)
    with pytest.raises(RuntimeError):
        run_eval("--model", "guess", "--limit", 5, "--output", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["n"] == 5


def test_an_existing_output_is_kept_unless_asked(run_eval, tmp_path):
    output = tmp_path / "out.json"
    output.write_text("precious")
    code, _, err = run_eval("--model", "guess", "--limit", 5, "--output", output)
    assert code == 2 and "out.json: exists" in err and output.read_text() == "precious"
    assert run_eval("--model", "guess", "--limit", 5, "--output", output, "--overwrite")[0] == 0
    assert json.loads(output.read_text())["n"] == 5


def test_two_evaluations_do_not_write_to_one_output(run_eval, tmp_path):
    output, aside = tmp_path / "out.json", tmp_path / ".out.json.tmp"
    aside.write_text("the first one is about to rename it")
    with files.only_writer(output):
        for more in ([], ["--overwrite"]):
            code, out, err = run_eval("--model", "guess", "--limit", 5, "--output", output, *more)
            assert (code, out) == (2, "")
            assert err == f"error: --output {output}: another evaluation is writing to it\n"
        assert aside.exists() and not output.exists()
        assert run_eval("--model", "guess", "--limit", 5, "--output", tmp_path / "other.json")[0] == 0
    assert run_eval("--model", "guess", "--limit", 5, "--output", output)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.json", "out.json"]


def test_an_output_that_another_evaluation_has_just_written_is_kept(run_eval, tmp_path, monkeypatch):
    """Between the first look at the name and the lock."""
    output = tmp_path / "out.json"

    @contextlib.contextmanager
    def late(path):
        output.write_text("precious")
        with files.only_writer(path):
            yield

    monkeypatch.setattr("eval.only_writer", late)
    code, _, err = run_eval("--model", "guess", "--limit", 5, "--output", output)
    assert code == 2 and "out.json: exists" in err and output.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [output]


def test_a_lock_whose_file_was_removed_meanwhile_is_not_taken_for_one(tmp_path, monkeypatch):
    """The one before removes the file after we opened it: locked, it would keep nobody out."""
    output, tried, real = tmp_path / "out.json", [], files.lock

    def lock(descriptor):
        if not tried:
            (tmp_path / ".out.json.lock").unlink()
        tried.append(descriptor)
        return real(descriptor)

    monkeypatch.setattr(files, "lock", lock)
    with files.only_writer(output):
        assert len(tried) == 2
        with pytest.raises(BlockingIOError), files.only_writer(output):
            pass
    assert not list(tmp_path.iterdir())


BAD = {
    "missing model": (["--model", "nowhere"], "--model nowhere"),
    "missing file": (["--scenarios", "no.json"], "no.json"),
    "no JSON": (["--scenarios", "text.json"], "text.json: not JSON"),
    "unknown family": (["--scenarios", "family.json"], "unknown family 'cooking'"),
    "empty file": (["--scenarios", "empty.json"], "empty.json"),
    "more than there are": (["--scenarios", "good.json", "--limit", "7"], "--limit 7: .*holds 6 scenarios"),
    "more than are held out": (["--limit", "251"], "--limit 251: .*250"),
    "no scenarios": (["--limit", "0"], "--limit 0: must be at least 1"),
    "negative temperature": (["--temperature", "-1"], "--temperature -1"),
    "NaN temperature": (["--temperature", "nan"], "--temperature nan"),
    "top-p": (["--top-p", "0"], "--top-p 0.0"),
    "no tokens": (["--max-completion-len", "0"], "--max-completion-len 0"),
    "full and limit": (["--full", "--limit", "5"], "--full"),
    "plot without compare": (["--plot", "x.png"], "--plot: needs --compare"),
    "output is a folder": (["--output", "."], "is a folder"),
    "output nowhere": (["--output", "nowhere/out.json"], "nowhere/out.json: its folder does not exist"),
    "greedy script": (["--also-greedy"], "--also-greedy: guess is a scripted policy"),
    "output under /proc": (["--output", "/proc/x.json"], "--output /proc/x.json: "),
    "output's name too long": (["--output", "x" * 248 + ".json"], "--output x+.json: .*too long"),
    "output in a dangling link": (["--output", "dangling/out.json"], "--output dangling/out.json: its folder"),
    "no reports": (["--compare"], "--compare: give at least two"),
    "one report": (["--compare", "good.json"], "--compare: give at least two"),
    "output of a comparison": (["--compare", "a.json", "b.json", "--output", "c.json"], "--output: nothing is eval"),
    "plot without ending": (["--compare", "a.json", "b.json", "--plot", "noext"], "--plot noext: must end in .png"),
    "comparison of a folder": (["--compare", "a.json", "."], "--compare a.json: No such file"),
    "plot that is there": (["--compare", "good.json", "old/b.json"], "--plot old/comparison.png: exists"),
    "no report": (["--compare", "good.json", "good.json"], "good.json: not an evaluation"),
}


@pytest.mark.parametrize("args, message", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_code_2(run_eval, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    Path("good.json").write_text(json.dumps(PUBLISHED))
    Path("text.json").write_text("not json at all")
    Path("empty.json").write_text("[]")
    Path("family.json").write_text(json.dumps([PUBLISHED[0] | {"family": "cooking"}]))
    Path("dangling").symlink_to("nowhere")
    Path("old").mkdir()
    Path("old/comparison.png").write_text("precious")
    Path("old/b.json").write_text("[]")
    before = sorted(Path(".").iterdir())
    code, out, err = run_eval("--model", "guess", *args)
    assert code == 2 and re.search(message, err), err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert out == "" and sorted(Path(".").iterdir()) == before


@pytest.mark.parametrize("args", [["--modle", "tiny"], ["--rubric", "star"], ["--limit", "many"], ["--engine", "jax"]])
def test_flags_that_do_not_parse_are_one_line_and_code_2(run_eval, args):
    code, out, err = run_eval(*args)
    assert code == 2 and out == "" and args[0] in err and err.count("\n") == 1


def test_every_flag_has_a_line_of_help():
    lines = (ROOT / "eval.py").read_text().split("\n")
    for name in eval_script.Arguments.__dataclass_fields__:
        at = next(i for i, line in enumerate(lines) if line.startswith(f"    {name}: "))
        assert lines[at + 1].strip().startswith('"""'), name


def test_examples_of_the_readme_leave_nothing_untracked():
    """Reports go to an ignored folder, and so does the plot of a comparison, which lies beside the last of them."""
    commands = [line.split("#")[0].split() for line in (ROOT / "README.md").read_text().splitlines()
                if line.startswith("python eval.py")]  # fmt: skip
    written = [words[words.index("--output") + 1] for words in commands if "--output" in words]
    written += [words[-1] for words in commands if "--compare" in words]
    assert len(written) >= 3 and "runs/" in (ROOT / ".gitignore").read_text().splitlines()
    assert all(path.startswith("runs/") for path in written)


def test_it_runs_as_a_script():
    done = subprocess.run(
        [sys.executable, str(ROOT / "eval.py"), "--model", "guess", "--limit", "5"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and "guess: 5 scenarios" in done.stdout, done.stderr
