"""Fixtures of several test files, and the switch that lets Triton kernels run where there is no GPU."""

import os
import sys

import pytest
import torch

# Read when a kernel is defined, Triton's own (tl.sum, tl.sigmoid) included: set before anything imports triton, and
# transformers does.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests import toy  # noqa: E402


def pytest_collection_modifyitems(items):
    """Several vLLM engines at once would fight for memory: where tests run in parallel, theirs do not."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        skip = pytest.mark.skip(reason="vLLM's tests run one after the other: `make test-vllm`")
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(skip)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder with the toy policy; dropout is set in its config, and must have no effect."""
    path = tmp_path_factory.mktemp("toy")
    tokenizer = toy.make_tokenizer()
    model = toy.make_model(tokenizer)
    model.config.attention_dropout = 0.1
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def run_eval(monkeypatch, capsys):
    """Runs `eval.py ARGS` in this process; returns (exit code, stdout, stderr)."""
    import eval as eval_script
    from grpo.console import run_entry

    def run_it(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, args)])
        code = 0
        try:
            run_entry(eval_script.main)
        except SystemExit as stop:
            code = stop.code
        out = capsys.readouterr()
        return code, out.out, out.err

    return run_it
