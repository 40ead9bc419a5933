"""What the documents tell a reader to type or to open is there: commands, flags, extras, make's targets, links."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from eval import Arguments as EvalArguments
from grpo.config import Config
from grpo.reproduce.plan import Arguments as ReproduceArguments
from tests.test_docs import LINK, anchors

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "*/README.md", "grpo/tiny/README.md", "env/server/README.md")
    for page in ROOT.glob(pattern)
    if page.parent.name != "results" and not page.parent.name.startswith(".")  # the first are made by a program
)
of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())

COMMAND = re.compile(r"\bpython(?: -m)? ([\w./]+)((?: +[^\s`#|]+)*)")
"""A program and its words, up to the end of the line or of the quoted text."""
ELSEWHERE = {"pip", "venv", "pytest", "ruff", "mypy", "http.server"}  # modules of other packages
OTHERS_FLAGS = {
    "--no-build-isolation",  # pip
    "--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--shutdown-timeout",  # torchrun
    "--data-parallel-size", "--enable-scale-out", "--logprobs-mode", "--max-model-len", "--tensor-parallel-size",
    "--worker-extension-cls", "--host",  # vllm
    "--url",  # openenv validate
    "--project", "--logdir",  # trackio, tensorboard
}  # fmt: skip


FOLDERS = ("grpo", "env", "scenarios", "kernels", "benchmarks", "demo", "docs", "tests")


def dashed(names):
    return {"--" + name.replace("_", "-") for name in names}


FLAGS = {
    "train.py": dashed(Config().flat()) | {"--help"},
    "eval.py": dashed(EvalArguments.__dataclass_fields__) | {"--help"},
    "grpo.reproduce": dashed([*ReproduceArguments.__dataclass_fields__, *Config().flat()]) | {"--help"},
}


@functools.cache
def all_flags() -> set[str]:
    """Of every command here: fields of classes called Arguments, what argparse is given, and the three's above."""
    found = set().union(*FLAGS.values(), OTHERS_FLAGS)
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", text))
        if "class Arguments" in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef) and node.name == "Arguments":
                    fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                    names = [field.id for field in fields if isinstance(field, ast.Name)]
                    found |= dashed(names) | dashed(f"no_{name}" for name in names)
    return found


def commands(page: Path) -> list[tuple[str, list[str]]]:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    text = re.sub(r"(`[^`\n]*)\n([^`\n]*`)", r"\1 \2", text)  # quoted over a line's end
    return [(program.rstrip("."), words.split()) for program, words in COMMAND.findall(text)]


def is_there(program: str) -> bool:
    """A file or folder from the root, or a module here."""
    module = ROOT / program.replace(".", "/")
    return (ROOT / program).exists() or module.with_suffix(".py").exists() or (module / "__main__.py").exists()


@of_each_page
def test_programs_that_are_called_exist_and_take_these_flags(page):
    for program, words in commands(page):
        if program.split(".")[0] in ELSEWHERE | {"vllm"}:
            continue
        assert is_there(program), f"python {program}"
        flags = {word.split("=")[0] for word in words if re.match(r"--[a-z]", word)}
        unknown = flags - FLAGS.get(program, all_flags())
        assert not unknown, f"python {program}: {unknown}"


@of_each_page
def test_flags_that_are_named_are_those_of_some_command(page):
    if page.name == "LOG.md":  # of what was dropped, flags too
        return
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", page.read_text(encoding="utf-8")))
    assert not named - all_flags()


@of_each_page
def test_links_lead_to_what_is_there(page):
    for _, text, target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            file = (page.parent / target).resolve() if target else page
            assert file.exists(), f"[{text}]({target})"
            assert not anchor or anchor in anchors(file), f"[{text}]({target}{anchor})"


@of_each_page
def test_extras_and_targets_exist(page):
    text = page.read_text(encoding="utf-8")
    extras = {name for names in re.findall(r"\"?\.\[([\w,-]+)\]", text) for name in names.split(",")} - {"NAME"}
    assert all(f'"{name}": [' in (ROOT / "setup.py").read_text() for name in extras), extras
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in targets), targets


def test_commands_of_the_readme_are_found():
    """The patterns above see what they are meant to check."""
    found = commands(ROOT / "README.md")
    programs = {program for program, _ in found}
    assert {"train.py", "eval.py", "grpo.reproduce", "kernels/bench/linear_grpo_loss.py", "demo"} <= programs
    assert ("train.py", ["--num-steps", "3", "--eval-limit", "4", "--output-dir", "runs/try"]) in found
    assert len(PAGES) >= 13 and not is_there("grpo.nothing") and "--nothing" not in all_flags()


def test_recipes_of_the_readme_are_those_of_the_code():
    from grpo.config import RECIPES

    rows = re.findall(r"^\| `([\w-]+)`.*?\| (.*?) \| ([\d.]+) \| (\S+) cosine \| (\d+) x (\d+) \| (\d+) \|$",
                      (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)  # fmt: skip
    assert {row[0] for row in rows} == set(RECIPES)
    for name, model, beta, rate, groups, episodes, tokens in rows:
        usual = Config().with_values(RECIPES[name]).flat()
        assert usual["model"] == (model if "/" in model else "tiny") and usual["lr_schedule"] == "cosine"
        keys = ("beta", "learning_rate", "prompts_per_step", "num_generations", "max_completion_len")
        assert [usual[key] for key in keys] == [float(beta), float(rate), int(groups), int(episodes), int(tokens)]


def test_the_number_of_settings_is_that_of_the_code():
    assert f"| {len(Config().flat())}, refused by name" in (ROOT / "docs/guide.md").read_text(encoding="utf-8")


def test_figures_of_the_readme_are_those_of_the_report():
    """Each row of the README's table of results stands in results/report.md, and so does each verdict."""
    report = (ROOT / "results/report.md").read_text(encoding="utf-8")
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Results")[1].split("Scripted policies")[0]
    rows = [line for line in text.splitlines() if re.match(r"\| (?!--)\S", line)]
    assert len(rows) >= 15
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if cells[-1].strip("*") in ("better", "worse", "cannot be told"):
            name, change, interval, verdict = cells
            assert re.search(rf"\| {re.escape(name)} \| {re.escape(change)} \| {re.escape(interval)} \|.*"
                             rf"\| {re.escape(verdict)} \|", report), row  # fmt: skip
        else:
            assert row in report, row
