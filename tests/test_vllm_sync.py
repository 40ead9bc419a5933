"""What is sent to vLLM and how it is checked, on plain modules and without vLLM."""

import math

import pytest
import torch

from grpo.engines import vllm_sync, vllm_tensors
from tests import toy


def make(**options):
    return toy.make_model(toy.make_tokenizer(), **options)


def fused(model):
    """A model of vLLM's shape: q, k and v in one matrix, gate and up in another."""
    copy = make(tie_word_embeddings=model.config.tie_word_embeddings)
    copy.load_state_dict(model.state_dict())
    copy.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    for layer in copy.model.layers:
        for block, (whole, parts) in zip((layer.self_attn, layer.mlp), copy.packed_modules_mapping.items()):
            joined = torch.nn.Linear(1, 1)
            joined.weight = torch.nn.Parameter(torch.cat([getattr(block, part).weight.detach() for part in parts]))
            for part in parts:
                delattr(block, part)
            setattr(block, whole, joined)
    return copy


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_once(tied):
    model = make(tie_word_embeddings=tied)
    names = [name for name, _ in vllm_tensors.named_weights(model)]
    assert len(names) == len(set(names)) == len(list(model.parameters()))
    assert ("lm_head.weight" in names) != tied
    assert names[0] == "model.embed_tokens.weight"


def test_equal_models_have_no_differing_tensors():
    model = make()
    assert vllm_tensors.differing_tensors(model, fused(model)) == []
    assert vllm_tensors.differing_tensors(model, fused(model).to(torch.bfloat16)) == []


@pytest.mark.parametrize("name", sorted(name for name, _ in make(tie_word_embeddings=False).named_parameters()))
def test_the_differing_tensor_is_named_and_no_other(name):
    model = make(tie_word_embeddings=False)
    sampler = fused(model)
    with torch.no_grad():
        model.get_parameter(name).add_(1e-3)
    assert vllm_tensors.differing_tensors(model, sampler) == [name]


def test_rows_in_another_order_differ():
    """The sum of all entries would not tell."""
    model = make()
    sampler = fused(model)
    with torch.no_grad():
        weight = model.get_parameter("model.layers.0.self_attn.k_proj.weight")
        weight.copy_(weight.flip(0))
        weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
        weight.copy_(weight.flip(1))
    assert vllm_tensors.differing_tensors(model, sampler) == [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ]


def test_the_tolerance_by_hand():
    config = make().config  # 2 layers, width 32
    expected = 2 * (2**-24 * 4 + 2**-24 * math.sqrt(16 * 32)) * 2.0
    assert vllm_sync.canary_tolerance(config, torch.float32, [-1.0, -3.0]) == pytest.approx(expected)
    half = 2 * (2**-8 * 4 + 2**-24 * math.sqrt(16 * 32))
    assert vllm_sync.canary_tolerance(config, torch.bfloat16, [-0.1]) == pytest.approx(half)


@pytest.mark.parametrize("merged", [False, True])
def test_lora_adapters_are_merged_on_the_way(merged):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(make(), config)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    if merged:
        model.merge_adapter()
    weights = dict(vllm_tensors.named_weights(model))
    plain = make(seed=1)
    assert weights.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(weights, strict=False)
    with torch.no_grad():
        actual = plain(input_ids=ids).logits
    assert torch.allclose(actual, expected, atol=1e-4)
    assert vllm_tensors.differing_tensors(model, fused(plain)) == []
