"""`python -m grpo.divergence`: the KL of a model to what it was trained from."""

import pytest
import torch

from grpo.config import ModelConfig
from grpo.divergence import divergence
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
