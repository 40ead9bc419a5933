"""docs/grpo_in_one_notebook.ipynb: it runs, its asserts hold, and what is committed is what such a run leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "docs" / "grpo_in_one_notebook.ipynb"
LIMIT = 180  # seconds of a cell, on a busy machine
KERNEL_NOISE = re.compile(r"/home/|/root/|/tmp/|site-packages|\bWarning\b")


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(cell):
    """What a cell shows: printed text, tables and coloured tokens, plots."""
    return [output.get("name") or next(iter(sorted(output["data"]))) for output in cell["outputs"]]


@pytest.fixture(scope="module")
def committed():
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def test_the_committed_notebook_was_run_once_from_top_to_bottom(committed):
    cells = code_cells(committed)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])
    shown = [kind for cell in cells for kind in kinds(cell)]
    assert "stderr" not in shown and shown.count("image/png") == 4 and shown.count("text/html") >= 8
    assert NOTEBOOK.stat().st_size < 400_000
    assert committed["metadata"].keys() == {"kernelspec", "language_info"}  # nothing of the machine it was run on


def test_its_outputs_name_no_place_of_the_machine_it_was_run_on(committed):
    for cell in code_cells(committed):
        for output in cell["outputs"]:
            text = output.get("text") or output["data"].get("text/html", "")
            assert not KERNEL_NOISE.search("".join(text))


def test_it_runs_and_its_asserts_hold(committed):
    """Also that a fresh run shows the same kinds of things, so that the committed outputs are those of this source."""
    nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed (the `test` extra)")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (the `test` extra)")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed (the `test` extra)")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in code_cells(notebook):
        cell["outputs"], cell["execution_count"] = [], None
    client = nbclient.NotebookClient(
        notebook, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute()  # raises with the cell and its error
    for fresh, cell in zip(code_cells(notebook), code_cells(committed), strict=True):
        assert [kind for kind in kinds(fresh) if kind != "stderr"] == kinds(cell), "".join(cell["source"])


def test_the_equalities_that_it_is_there_for_are_asserted(committed):
    """By hand on one side, the package on the other; taken out, the notebook would teach what nobody checked."""
    asserts = "\n".join(
        line for cell in code_cells(committed) for line in "".join(cell["source"]).splitlines() if "assert " in line
    )
    for what in (
        "torch.tensor(advantages[groups.index(group)]",
        "torch.allclose(mine, theirs",
        "torch.allclose(ref_logprobs, old_logprobs",
        "torch.allclose(loss, first_loss",
        "torch.allclose(leaf.grad, -w * A",
        "torch.allclose(second_loss, loss",
        'result.losses["loss"] - first_loss',
        'result.losses["grad_norm"] / norm',
        "error < 1e-3",
    ):
        assert what in asserts, what
