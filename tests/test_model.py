"""Loading policies, their log-probs, and one line of reason for what cannot be loaded."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo import model as model_module
from grpo.batching import Packing, make_microbatches
from grpo.config import ModelConfig, UsageError
from grpo.head import token_logprobs
from grpo.model import Policy, load_policy
from tests.test_batching import episode


@pytest.fixture(scope="module")
def policy(folder) -> Policy:
    return load_policy(ModelConfig(model=str(folder), device="cpu"))


def padded_batch():
    rows = [episode(range(5, 5 + p), range(40, 40 + c), [1, 0, 1, 1, 1][:c]) for p, c in ((3, 5), (6, 1), (2, 4))]
    (batch,) = make_microbatches(rows, [1.0] * 3, max_tokens=1000, packing=Packing(packed=False))
    return batch


@pytest.fixture(scope="module")
def batch():
    return padded_batch()


def eager_logprobs(policy, batch, temperature=1.0):
    """Each row alone, without padding, through the model's own forward: [N]."""
    found = []
    for row, column, target in zip(batch.predict_rows, batch.predict_cols, batch.targets):
        logits = policy.model(batch.input_ids[row : row + 1, : column + 1]).logits[0, -1].double()
        found.append(torch.log_softmax(logits / temperature, -1)[target])
    return torch.stack(found)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_equal_an_unpadded_forward(policy, batch, temperature):
    logprobs, entropy = token_logprobs(policy, batch, temperature)
    assert torch.allclose(logprobs.double(), eager_logprobs(policy, batch, temperature), atol=1e-5)
    hidden = model_module.hidden_states(policy, batch)
    distribution = torch.distributions.Categorical(logits=policy.model.lm_head(hidden) / temperature)
    assert torch.allclose(entropy, distribution.entropy(), atol=1e-5)
    assert logprobs.requires_grad and entropy.requires_grad


def test_gradient_checkpointing_changes_nothing(folder, policy, batch):
    recomputing = load_policy(ModelConfig(model=str(folder), device="cpu", gradient_checkpointing=True))
    gradients = []
    for each in (policy, recomputing):
        each.model.zero_grad()
        token_logprobs(each, batch)[0].sum().backward()
        gradients.append([p.grad for p in each.model.parameters()])
    assert recomputing.model.is_gradient_checkpointing
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients))


def test_dropout_is_off_even_in_training_mode(folder, policy, batch):
    assert json.loads((folder / "config.json").read_text())["attention_dropout"] == 0.1
    first, second = token_logprobs(policy, batch)[0], token_logprobs(policy, batch)[0]
    assert torch.equal(first, second)


def test_bfloat16_computes_in_bfloat16_with_float32_weights(folder, batch):
    half = load_policy(ModelConfig(model=str(folder), device="cpu", dtype="bfloat16"))
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}
    exact = token_logprobs(load_policy(ModelConfig(model=str(folder), device="cpu")), batch)[0]
    rough = token_logprobs(half, batch)[0]
    assert 0 < (exact - rough).abs().max() < 0.1


def test_padding_does_not_matter(policy, batch):
    other = dataclasses.replace(batch, input_ids=batch.input_ids.masked_fill(batch.input_ids == 0, 7))
    assert not torch.equal(batch.input_ids, other.input_ids)
    assert torch.equal(token_logprobs(policy, batch)[0], token_logprobs(policy, other)[0])


@pytest.mark.parametrize("name", ["missing/folder/deep", "./nowhere", "/no/such/model", "a name"])
def test_missing_folder_is_one_line(name):
    with pytest.raises(UsageError) as error:
        load_policy(ModelConfig(model=name, device="cpu"))
    assert f"--model {name}" in str(error.value) and "\n" not in str(error.value)


def test_folder_without_a_model_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="no config.json"):
        load_policy(ModelConfig(model=str(tmp_path), device="cpu"))
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(UsageError, match="not a loadable causal language model"):
        load_policy(ModelConfig(model=str(tmp_path), device="cpu"))


def test_damaged_folders_are_one_line(folder, tmp_path):
    """Garbage weights, weights that are missing, weights of another shape, weights that are NaN, no tokenizer."""

    def spoil(name, weights=None, **config):
        copy = shutil.copytree(folder, tmp_path / name)
        if weights is not None:
            tensors = load_file(copy / "model.safetensors")
            save_file(weights(tensors), copy / "model.safetensors", metadata={"format": "pt"})
        values = json.loads((copy / "config.json").read_text()) | config
        (copy / "config.json").write_text(json.dumps(values))
        return copy

    garbage = spoil("garbage")
    (garbage / "model.safetensors").write_bytes(b"junk")
    folders = {
        garbage: "not a loadable",
        spoil("missing", lambda t: dict(list(t.items())[::2])): "weights are not in its files",
        spoil("renamed", lambda t: {"x." + name: value for name, value in t.items()}): "weights are not in its files",
        spoil("shape", hidden_size=16): "not a loadable",
        spoil("nan", lambda t: {name: value * float("nan") for name, value in t.items()}): "not finite",
    }
    for path, reason in folders.items():
        with pytest.raises(UsageError, match=reason) as error:
            load_policy(ModelConfig(model=str(path), device="cpu"))
        assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_path_under_an_existing_folder_is_never_looked_up_on_a_hub(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        load_policy(ModelConfig(model="runs/nope", device="cpu"))


def test_fingerprint_changes_with_one_weight(policy):
    before = model_module.fingerprint(policy)
    assert before == model_module.fingerprint(policy)
    with torch.no_grad():
        policy.model.lm_head.weight[3, 3] += 1e-3
        changed = model_module.fingerprint(policy)
        policy.model.lm_head.weight[3, 3] -= 1e-3
    assert changed != before


def test_unknown_device_is_one_line():
    with pytest.raises(UsageError, match="--device quantum"):
        load_policy(ModelConfig(device="quantum"))


def test_a_model_that_changes_logits_after_its_head_is_refused(policy, monkeypatch):
    original = policy.model.forward

    def capped(*args, **kwargs):
        output = original(*args, **kwargs)
        output.logits = 0.5 * torch.tanh(output.logits / 0.5)
        return output

    monkeypatch.setattr(policy.model, "forward", capped)
    with pytest.raises(UsageError, match="after its head"):
        model_module._check_head(policy)
