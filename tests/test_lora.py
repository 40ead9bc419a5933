"""LoRA: the policy starts as its base, only adapters are trained and saved, and the base inside is the reference."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo.batching import Packing
from grpo.config import Config, ModelConfig, UsageError
from grpo.lora import adapted_layers, adapter_weights, adapters_off
from grpo.model import fingerprint, load_policy
from grpo.reference import Reference
from grpo.run import make_trainer, save_final
from tests.test_run import train_py

pytest.importorskip("peft", reason="peft is not installed (the `lora` extra)")

IDS = torch.arange(40)[None] % 300 + 3


def settings(**values) -> Config:
    return Config().with_values(
        dict(device="cpu", dtype="float32", beta=0.2, lora_rank=4, num_steps=4, prompts_per_step=2, num_generations=3,
             learning_rate=1e-2, warmup_steps=0, lr_schedule="constant", max_completion_len=120)
        | values
    )  # fmt: skip


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


@pytest.fixture(scope="module")
def trained():
    """A trainer after two steps, and what the base said before them."""
    trainer, _ = make_trainer(settings())
    base = logits(load_policy(ModelConfig(device="cpu")).model)
    assert torch.equal(logits(trainer.policy.model), base)  # B = 0
    before = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
    results = [trainer.step(0), trainer.step(1)]
    return trainer, base, before, results


def test_only_adapters_move(trained):
    trainer, base, before, results = trained
    moved = {name for name, p in trainer.policy.model.named_parameters() if not torch.equal(p, before[name])}
    adapters = adapter_weights(trainer.policy.model)
    assert moved and moved <= set(adapters) and any(".lora_B." in name for name in moved)
    assert {name for name, p in trainer.policy.model.named_parameters() if p.requires_grad} == set(adapters)
    assert trainer.policy.num_trained == sum(p.numel() for p in adapters.values()) < 0.1 * trainer.policy.num_parameters
    assert not any("lm_head" in name or "embed" in name for name in adapters)
    assert results[0].losses["kl"] == 0.0 and results[1].losses["kl"] > 0.0
    assert not torch.allclose(logits(trainer.policy.model), base, atol=1e-3)


def test_the_reference_is_the_base_without_a_second_copy(trained):
    trainer, base, _, results = trained
    assert trainer.reference.policy is trainer.policy
    config = dataclasses.replace(trainer.config.model, lora_rank=0)
    copy = Reference(config, trainer.packing, trainer.engine.max_context)
    episodes = [episode for group in results[1].groups for episode in group.episodes]
    for packing in (trainer.packing, Packing(packed=False)):
        found, expected = (
            with_packing(reference, packing).logprobs(episodes, 1.0, 4096) for reference in (trainer.reference, copy)
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with adapters_off(trainer.policy.model):
        assert torch.equal(logits(trainer.policy.model), base)
    assert all(p.requires_grad for p in adapter_weights(trainer.policy.model).values())  # on again
    with pytest.raises(KeyError), adapters_off(trainer.policy.model):
        raise KeyError
    assert not torch.equal(logits(trainer.policy.model), base)


def with_packing(reference: Reference, packing: Packing) -> Reference:
    clone = object.__new__(Reference)
    clone.__dict__ = reference.__dict__ | {"packing": packing, "_prefix": {}}
    return clone


def test_the_fingerprint_is_the_bases(trained):
    assert fingerprint(trained[0].policy) == fingerprint(load_policy(ModelConfig(device="cpu")))


def test_the_final_model_is_merged_and_the_adapter_is_peft_s(trained, tmp_path):
    import peft

    policy = trained[0].policy
    save_final(policy, tmp_path / "final")
    expected = logits(policy.model)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)
    assert not any("lora" in name or "base_layer" in name for name in load_file(tmp_path / "final/model.safetensors"))
    base = load_policy(ModelConfig(device="cpu")).model
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "final" / "adapter"))
    torch.testing.assert_close(logits(adapted), expected, rtol=0, atol=1e-5)


def test_persistent_buffers_are_in_the_final_model(trained, tmp_path):
    """As the biases of routers are: no parameters, but part of a checkpoint."""
    policy = copy.deepcopy(trained[0].policy)
    layer = policy.model.model.layers[0].mlp.gate_proj
    layer.base_layer.register_buffer("bias_of_router", torch.tensor([1.5]))
    layer.base_layer.register_buffer("scratch", torch.zeros(1), persistent=False)
    save_final(policy, tmp_path / "final")
    stored = load_file(tmp_path / "final" / "model.safetensors")
    assert stored["model.layers.0.mlp.gate_proj.bias_of_router"].tolist() == [1.5]
    assert not [name for name in stored if "scratch" in name]


def test_checkpoints_hold_adapters_only_and_resume_exactly(tmp_path):
    flags = ["--device", "cpu", "--beta", "0.2", "--lora-rank", "4", "--prompts-per-step", "1",
             "--num-generations", "2", "--max-completion-len", "60", "--eval-limit", "0", "--save-every", "1",
             "--num-steps", "3", "--keep-checkpoints", "9", "--learning-rate", "1e-2"]  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        assert train_py([*flags, "--output-dir", str(folder)]) == 0
    stored = load_file(whole / "checkpoints/step-000002/model.safetensors")
    assert stored and all(".lora_" in name for name in stored)
    shutil.rmtree(cut / "checkpoints/step-000003")
    shutil.rmtree(cut / "final")
    assert train_py(["--resume", str(cut)]) == 0
    for name in ("final/model.safetensors", "final/adapter/adapter_model.safetensors"):
        assert (whole / name).read_bytes() == (cut / name).read_bytes(), name


def test_peft_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match=r'--lora-rank 4: needs peft: pip install -e "\.\[lora\]"'):
        load_policy(ModelConfig(device="cpu", lora_rank=4))


def test_every_linear_layer_but_the_head_has_one():
    policy = load_policy(ModelConfig(device="cpu", lora_rank=2))
    assert len(adapted_layers(policy.model)) == 7 * policy.model.config.num_hidden_layers
