"""`python -m grpo.divergence`: the KL of a model to what it was trained from."""

import json

import pytest
import torch

from grpo.config import ModelConfig
from grpo.console import run_entry
from grpo.divergence import divergence, main
from grpo.model import load_policy


def test_a_model_has_no_divergence_from_itself(folder):
    assert divergence(str(folder), str(folder), limit=3) == pytest.approx(0, abs=1e-9)


def test_a_moved_model_has_one(folder, tmp_path):
    policy = load_policy(ModelConfig(model=str(folder), device="cpu"))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * parameter.std() * torch.randn_like(parameter))
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    near = divergence(str(tmp_path), str(folder), limit=3)
    assert 1e-5 < near < 1


def test_the_command_writes_its_number_and_names_a_bad_limit(folder, tmp_path, monkeypatch, capsys):
    def command(*args):
        monkeypatch.setattr("sys.argv", ["divergence", str(folder), "--base", str(folder), *args])
        run_entry(main)

    command("--limit", "2", "--max-completion-len", "24", "--output", str(tmp_path / "kl.json"))
    written = json.loads((tmp_path / "kl.json").read_text())
    assert written["kl"] == pytest.approx(0, abs=1e-9) and (written["limit"], written["max_completion_len"]) == (2, 24)
    with pytest.raises(SystemExit, match="2"):
        command("--limit", "0")
    assert "--limit 0: must be at least 1" in capsys.readouterr().err
