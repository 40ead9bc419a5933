"""Which sampler a run gets, and what is said where it cannot be had."""

import importlib.metadata
import sys

import pytest
import torch

from grpo import run
from grpo.config import Config, UsageError
from grpo.engines import choice
from grpo.engines.torch_engine import TorchEngine
from scenarios.generator import held_out


def with_vllm(monkeypatch, installed):
    found = ["a distribution"] if installed else []
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: iter(found if name == "vllm" else []))


@pytest.mark.parametrize(
    ("asked", "device", "installed", "engine"),
    [
        ("auto", "cpu", True, "torch"),
        ("auto", "cuda", True, "vllm"),
        ("auto", "cuda", False, "torch"),
        ("torch", "cuda", True, "torch"),
        ("vllm", "cpu", False, "vllm"),
    ],
)
def test_auto_is_vllm_on_a_gpu_where_it_is_installed(monkeypatch, asked, device, installed, engine):
    with_vllm(monkeypatch, installed)
    assert choice.which_engine(asked, torch.device(device)) == engine


def make(folder, **values):
    settings = Config().with_values(
        dict(recipe="tiny", model=str(folder), device="cpu", max_completion_len=48) | values
    )
    policy = run.load_policy(settings.model)
    return choice.make_engine(settings, policy, run.make_chat(policy), held_out(5))


def test_without_vllm_one_line_names_the_command(folder, monkeypatch):
    """Also where something else of that name can be imported."""
    monkeypatch.delitem(sys.modules, "grpo.engines.vllm_engine", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UsageError) as error:
        make(folder, engine="vllm")
    assert 'pip install -e ".[vllm]"' in str(error.value) and "\n" not in str(error.value)
    monkeypatch.delitem(sys.modules, "grpo.engines.vllm_engine", raising=False)


def test_a_share_of_a_gpu_needs_one(folder):
    with pytest.raises(UsageError, match="--gpu-memory 0.5: is vLLM's share of a GPU"):
        make(folder, gpu_memory=0.5)


def test_an_episode_has_room_for_the_longest_prompt_and_its_tokens_as_far_as_the_model_goes(folder):
    chosen = make(folder)
    assert isinstance(chosen, TorchEngine)
    longest = chosen.max_context - choice.PROMPT_MARGIN - 48
    assert make(folder, max_completion_len=100).max_context == longest + choice.PROMPT_MARGIN + 100
    assert make(folder, max_completion_len=9000).max_context == 2048
