"""The documents say what the code does: quotes stand in the source, calculations run, figures are those of the code."""

from __future__ import annotations

import ast
import doctest
import functools
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from grpo.advantages import group_advantages, token_weights
from grpo.config import LossConfig
from grpo.loss import grpo_loss, kl_divergence, surrogate

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [DOCS / "reading_the_loss.md", DOCS / "kernels.md"]
of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
TREES = ("What happens in a step", "Where things are")  # of the README
# "[grpo/loss.py](../grpo/loss.py), `surrogate`": what the ```python blocks behind it quote
SOURCE = re.compile(r"\]\(\.\./([\w/.]+\.py)\),\s+`(\w+)`")


@functools.cache
def figures():
    """docs/make_figures.py, which imports its neighbours."""
    sys.path.insert(0, str(DOCS))
    try:
        import make_figures
    finally:
        sys.path.remove(str(DOCS))
    return make_figures


def blocks(page: Path, language: str) -> list[tuple[str, int]]:
    """Code blocks of a language, and where each begins."""
    text = page.read_text()
    return [(match[2], match.start()) for match in BLOCK.finditer(text) if match[1] == language]


def source_of(path: str, name: str) -> list[str]:
    """The lines of a function or class, without indentation."""
    text = (ROOT / path).read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return [line.strip() for line in text.splitlines()[node.lineno - 1 : node.end_lineno]]
    raise AssertionError(f"{path} has no {name}")


def quoted(lines: list[str], source: list[str]) -> bool:
    """Whether `lines` stand in `source` one after the other."""
    return any(source[i : i + len(lines)] == lines for i in range(len(source)))


@of_each_page
def test_quoted_code_stands_in_the_function_that_is_named(page):
    text = page.read_text()
    found = blocks(page, "python")
    assert len(found) >= 4
    for code, position in found:
        path, name = SOURCE.findall(text[:position])[-1]
        lines = [line.strip() for line in code.strip().splitlines()]
        assert quoted(lines, source_of(path, name)), f"{page.name} quotes what is not in {path}, {name}:\n{code}"


@pytest.mark.parametrize("change", [lambda line: line + " ", lambda line: line.replace("ratio", "r"), lambda line: ""])
def test_a_changed_line_is_noticed(change):
    lines = ["clipped_ratio = ratio.clamp(low, high)", "if config.delta is not None:"]
    source = source_of("grpo/loss.py", "surrogate")
    assert quoted(lines, source)
    assert not quoted(lines[::-1], source) and not quoted([change(lines[0]), lines[1]], source)


@of_each_page
def test_calculations_come_out_as_printed(page):
    shared: dict = {}
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    examples = blocks(page, "pycon")
    for code, position in examples:
        line = page.read_text()[:position].count("\n") + 1
        test = parser.get_doctest(code, shared, page.name, str(page), line)
        assert test.examples
        report: list[str] = []
        runner.run(test, out=report.append, clear_globs=False)
        shared = test.globs
        assert not report, "".join(report)
    assert runner.summarize(verbose=False).attempted >= 10


@of_each_page
def test_blocks_are_quotes_or_calculations(page):
    """Anything else would be code that nothing checks."""
    assert {language for language, _ in BLOCK.findall(page.read_text())} == {"python", "pycon"}


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = BLOCK.sub("", page.read_text())
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@of_each_page
def test_links_lead_somewhere(page):
    found = LINK.findall(page.read_text())
    assert len(found) > 10
    for _, text, target, anchor in found:
        assert not target.startswith("http"), f"{target}: nothing here checks other sites"
        file = (page.parent / target).resolve() if target else page
        assert file.is_file(), f"[{text}]({target})"
        if anchor:
            assert anchor in anchors(file), f"[{text}]({target}{anchor})"


@of_each_page
def test_tests_that_are_named_exist(page):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())
    assert len(named) >= (20 if page.name == "reading_the_loss.md" else 1)
    for path, name in named:
        functions = {n.name for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.FunctionDef)}
        assert name in functions, f"{path} has no {name}"


def test_figures_are_those_of_the_script_shown_and_small():
    names = {f"figures/{name}.png" for name in figures().FIGURES}
    pages = [*PAGES, DOCS / "scaling.md"]  # the last one: tests/test_cost_model.py
    shown = {target for page in pages for image, _, target, _ in LINK.findall(page.read_text()) if image}
    assert shown == names == {f"figures/{file.name}" for file in (DOCS / "figures").iterdir()}
    for name in names:
        assert (DOCS / name).stat().st_size < 60_000


@pytest.mark.parametrize("name", [
    "mask", "group_size", "epsilon", "loss_types", "weights", "kl_estimators", "beta", "gemms", "chunk", "row_passes",
    "online_softmax", "traffic", "scaling_check", "scaling_phases", "scaling_strong",
])  # fmt: skip
def test_a_figure_shows_what_the_code_computes(name):
    with Image.open(DOCS / "figures" / f"{name}.png") as image:
        drawn = json.loads(image.info["fingerprint"])
    now = figures().fingerprint(figures().figure_of(name))
    # Six digits were kept. Curves of a trained policy go through thousands of roundings.
    assert now == pytest.approx(drawn, rel=1e-4, abs=1e-6), "run: python docs/make_figures.py"


def table(page: Path, header: str) -> list[list[str]]:
    """The rows of the table whose header begins like that."""
    rows = page.read_text().split(f"\n{header}")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_worked_example_by_hand_and_by_the_code():
    """Every cell, by plain arithmetic and by the functions of training, to the digits that are printed."""
    rows = table(PAGES[0], "| member | A | old | now | base |")
    member = [int(row[0]) for row in rows]
    advantage, old, now, base, r, s, k3, w, term, gradient = (
        [float(row[column]) for row in rows] for column in range(1, 11)
    )
    counts, rewards = [member.count(i) for i in range(4)], [0.10, 0.30, 0.70, 0.70]

    def printed(column):
        return pytest.approx(column, abs=0.5001e-4)

    # By hand.
    mean = sum(rewards) / 4
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / 3)
    exact = [(rewards[i] - mean) / (std + 1e-4) for i in member]
    assert exact == printed(advantage)
    ratios = [p / q for p, q in zip(now, old)]
    assert ratios == printed(r)
    clipped = [min(max(x, 0.8), 1.2) for x in ratios]
    surrogates = [min(x * a, c * a) for x, c, a in zip(ratios, clipped, exact)]
    assert surrogates == printed(s)
    kls = [q / p - math.log(q / p) - 1 for p, q in zip(now, base)]
    assert kls == printed(k3)
    weights = [1 / (4 * counts[i]) for i in member]
    assert weights == printed(w)
    terms = [v * (0.2 * kl - x) for v, kl, x in zip(weights, kls, surrogates)]
    assert terms == printed(term)
    open_ = [x * a <= c * a for x, c, a in zip(ratios, clipped, exact)]
    gradients = [v * (0.2 * (1 - q / p) - (x * a if inside else 0))
                 for v, p, q, x, a, inside in zip(weights, now, base, ratios, exact, open_)]  # fmt: skip
    assert gradients == printed(gradient)
    assert open_.count(False) == 2  # the example has both kinds of clipping

    # By the code.
    config = LossConfig(beta=0.2)
    policy = torch.tensor(now, dtype=torch.float64).log().requires_grad_()
    before, ref = (torch.tensor(column, dtype=torch.float64).log() for column in (old, base))
    a = torch.tensor(group_advantages([rewards])[0], dtype=torch.float64)[member]
    assert surrogate((policy - before).exp(), policy, a, config).tolist() == printed(s)
    assert kl_divergence(policy, ref, "k3", policy).tolist() == printed(k3)
    of_episode = torch.tensor(token_weights(counts, "grpo", 10, [True] * 4), dtype=torch.float64)
    loss, _ = grpo_loss(
        policy_logprobs=policy, old_logprobs=before, ref_logprobs=ref, advantages=a, token_weights=of_episode[member],
        episode_index=torch.tensor(member), config=config,
    )  # fmt: skip
    loss.backward()
    assert policy.grad.tolist() == printed(gradient)
    total = re.search(r"Loss, the sum of the terms: \*\*([\d.-]+)\*\*", PAGES[0].read_text())[1]
    assert loss.item() == printed(float(total)) and sum(terms) == pytest.approx(loss.item(), abs=1e-12)


def test_what_is_said_of_the_estimators_gradients():
    """On average over sampled tokens: k1 has none, k2 and k3_ratio KL(policy, base)'s, k3 KL(base, policy)'s."""
    logits = torch.tensor([0.9, -0.3, 0.1, 0.0, -1.2], dtype=torch.float64, requires_grad=True)
    policy, ref = torch.log_softmax(logits, 0), torch.log_softmax(torch.arange(5.0).double() / 3, 0)

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    def average(estimator):
        _, slopes = figures().kl_slopes(policy.detach(), ref, estimator)
        return gradient((policy.detach().exp() * slopes * policy).sum())

    forward, backward = gradient((policy.exp() * (policy - ref)).sum()), gradient((ref.exp() * (ref - policy)).sum())
    assert (forward - backward).abs().max() > 0.1
    expected = {"k1": torch.zeros(5).double(), "k2": forward, "k3": backward, "k3_ratio": forward}
    for estimator, value in expected.items():
        torch.testing.assert_close(average(estimator), value, rtol=0, atol=1e-12)
    for estimator, is_the_kl in {"k1": True, "k2": False, "k3": True, "k3_ratio": True}.items():
        values, _ = figures().kl_slopes(policy.detach(), ref, estimator)
        mean, exact = (policy.exp() * values).sum().item(), (policy.exp() * (policy - ref)).sum().item()
        assert (abs(mean - exact) < 1e-12) == is_the_kl


@pytest.mark.parametrize("size", [2, 5, 16])
def test_what_is_said_of_a_lone_winner(size):
    winner, loser = group_advantages([[1.0] + [0.0] * (size - 1)])[0][:2]
    assert (winner, loser) == pytest.approx(((size - 1) / size**0.5, -1 / size**0.5), rel=1e-3)


def test_measured_figures_are_quoted_from_the_kernels_readme():
    readme = (ROOT / "kernels/README.md").read_text()
    measured = {row[0]: row[2] for row in table(ROOT / "kernels/README.md", "| | D=256, V=32768, fp32 | D=1024")}
    rows = table(PAGES[1], "| | seconds | peak memory")
    assert len(rows) == 5
    for name, seconds, memory in rows:
        figure = measured["**this one**" if name == "`linear_grpo_loss`" else name].replace("*", "")
        assert figure == (f"{seconds} ({memory})" if memory else seconds), name
    command = re.search(r"`(python kernels/bench/linear_grpo_loss\.py --budget \d+)`", PAGES[1].read_text())[1]
    assert command in readme


def test_the_traffic_figure_has_the_formulas_of_the_text():
    (code,) = [code for code, _ in blocks(PAGES[1], "pycon") if "of_dw" in code]
    triton = figures().kernel_figures.traffic_bytes(8192, 2048, 151936, 2, 3)
    resident = figures().kernel_figures.traffic_bytes(8192, 2048, 151936, 2, 2)
    values = (triton["logits"], resident["logits"], triton["W"], triton["dW"], triton["X, dX"])
    assert repr([f"{value / 1e9:.2f} GB" for value in values]) in code


def test_the_readme_s_file_trees_name_what_there_is():
    """A path or a module of grpo/ that is named exists, and no module of grpo/ is left out."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    step, tree = (re.search(rf"## {title}\n.*?```\n(.*?)```", text, re.S)[1] for title in TREES)
    named = set(re.findall(r"(?<![\w/])[\w.]+(?:/[\w.]*)*\.(?:py|yaml|toml|md)", step + tree))
    missing = [name for name in named if not (ROOT / name).exists() and not (ROOT / "grpo" / name).exists()]
    assert not missing and len(named) > 50
    modules = {path.name for path in (ROOT / "grpo").glob("*.py")} - {"__init__.py"}
    assert not modules - {name.removeprefix("grpo/") for name in named}
    folders = {line.split("/")[0] for line in tree.splitlines() if re.match(r"\w+/ ", line)}
    assert {path.parent.name for path in ROOT.glob("*/*.py")} - {"tests"} <= folders | {"tests"}
