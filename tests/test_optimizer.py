"""AdamW over float32 weights: what bfloat16 weights would lose, and moments in 8 bits."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file

from grpo import checkpoint
from grpo.config import UsageError, parse
from grpo.engines.vllm_memory import GIB, ModelSize, gpu_plan
from grpo.optimizer import MOMENT_BYTES, make_optimizer
from grpo.trainer import Stopwatch
from tests.test_checkpoint import save
from tests.test_run import arguments, train_py
from tests.test_trainer import make, spread_rewards

RATE = 5e-7  # of the recipe clarify-run4


def parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for shape in shapes]


def descend(weights: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Towards a fixed target, on noisy gradients that are the same for every optimizer."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for weight in weights:
            noise = 0.01 * torch.randn(weight.shape, generator=generator)
            weight.grad = (weight.detach().float() - 0.05 + noise).to(weight.dtype)
        optimizer.step()


def test_a_small_step_moves_float32_weights_and_is_lost_on_bfloat16_ones():
    (weight,) = parameters((200, 100))
    rounded = torch.nn.Parameter(weight.detach().bfloat16())
    before = weight.detach().clone(), rounded.detach().clone()
    for each in (weight, rounded):
        descend([each], make_optimizer([each], "adamw", RATE), steps=10)
    moved = [float((now != then).float().mean()) for now, then in zip((weight, rounded), before)]
    # Ten steps change a weight by at most 5e-6. Half the distance between bfloat16 numbers is more than that for all
    # weights above 1e-3 or so.
    assert moved[0] > 0.999 and moved[1] < 0.06
    assert float((weight.detach() - before[0]).abs().mean()) == pytest.approx(10 * RATE, rel=0.1)


def test_training_computes_in_bfloat16_and_keeps_float32_weights_that_move(folder):
    trainer = make(folder, dtype="bfloat16", learning_rate=RATE, warmup_steps=0, lr_schedule="constant")
    before = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
    trainer.train_on(0, spread_rewards(trainer.sample_groups(0)), Stopwatch())
    named = dict(trainer.policy.model.named_parameters())
    assert {p.dtype for p in named.values()} == {torch.float32}
    states = trainer.optimizer.state.values()
    assert {tensor.dtype for state in states for tensor in state.values()} == {torch.float32}
    trained = [name for name, p in named.items() if p.grad.abs().max() > 1e-4]
    moved = [bool((named[name] != before[name]).any()) for name in trained]
    # The same change on weights rounded to bfloat16: next to nothing would be left of it.
    kept = [float((named[name].bfloat16() != before[name].bfloat16()).float().mean()) for name in trained]
    assert trained and all(moved) and max(kept) < 0.05


def test_adamw8bit_without_its_package_is_one_line_and_leaves_nothing(folder, tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert train_py(arguments(folder, tmp_path / "run", optimizer="adamw8bit")) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said == 'error: --optimizer adamw8bit: needs bitsandbytes: pip install -e ".[adamw8bit]"'
    assert not (tmp_path / "run").exists()


def test_it_is_refused_in_several_processes(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UsageError, match="--optimizer adamw8bit: runs in one process only"):
        make_optimizer(parameters((2, 2)), "adamw8bit", RATE)
    assert isinstance(make_optimizer(parameters((2, 2)), "adamw", RATE), torch.optim.AdamW)


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(UsageError, match="--optimizer"):
        parse(["--optimizer", "sgd"], {})


def test_a_gpu_s_plan_knows_what_the_moments_take():
    size = ModelSize(parameters=10**9, layers=24, hidden=1024, query=1024, key=1024, mlp=4096)
    plans = [
        gpu_plan(40 * GIB, size, torch.bfloat16, max_context=2048, min_context=600, episodes=8, update_tokens=0,
                 trained=10**9, reference=True, moments=MOMENT_BYTES[name])
        for name in ("adamw", "adamw8bit")
    ]  # fmt: skip
    need = [float(plan.reason.split(" about ")[1].split(" GiB")[0]) for plan in plans]
    assert need[0] - need[1] == pytest.approx(6e9 / GIB, abs=1)


class TestEightBits:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (the `adamw8bit` extra)")

    def test_it_follows_adamw(self):
        shapes = ((64, 128), (300,))
        ends = {}
        for name in ("adamw", "adamw8bit"):
            weights = parameters(*shapes)
            descend(weights, make_optimizer(weights, name, 1e-3), steps=30)
            ends[name] = weights
        start = parameters(*shapes)
        for first, plain, eight in zip(start, ends["adamw"], ends["adamw8bit"]):
            way = (plain - first).abs().mean()
            assert way > 0.015  # 30 steps of 1e-3
            assert (plain - eight).abs().mean() < 0.02 * way
        assert not torch.equal(ends["adamw"][0], ends["adamw8bit"][0])  # it is another optimizer
        torch.testing.assert_close(ends["adamw"][1], ends["adamw8bit"][1], rtol=0, atol=1e-6)  # float32 moments

    def test_the_memory_of_its_moments(self):
        taken = {}
        for name in ("adamw", "adamw8bit"):
            weights = parameters((512, 256), (100, 256))
            optimizer = make_optimizer(weights, name, 1e-3)
            descend(weights, optimizer, steps=1)
            states = optimizer.state_dict()["state"].values()
            taken[name] = sum(tensor.nbytes for state in states for tensor in state.values())
        count = 512 * 256 + 100 * 256
        maps = 2 * 2 * 256 * 4  # shared in memory, written for each tensor
        assert taken["adamw"] == 8 * count + 2 * 4
        assert taken["adamw8bit"] == 2 * count + 2 * 4 * count // 256 + maps + 2 * 8
        assert taken["adamw8bit"] < 0.27 * taken["adamw"]

    def test_a_state_goes_through_a_checkpoint_bit_for_bit(self, tmp_path):
        model, other = (torch.nn.Sequential(torch.nn.Linear(96, 128), torch.nn.Linear(128, 64)) for _ in range(2))
        optimizers = [make_optimizer(each.parameters(), "adamw8bit", 1e-3) for each in (model, other)]
        descend(list(model.parameters()), optimizers[0], steps=3)
        checkpoint.load(save(tmp_path, 3, model, optimizers[0]), other, optimizers[1])
        stored = load_file(tmp_path / "checkpoints/step-000003/optimizer.safetensors")
        assert stored["0.state1"].dtype == torch.uint8 and int(stored["0.step"]) == 3
        for each, optimizer in zip((model, other), optimizers):
            descend(list(each.parameters()), optimizer, steps=4)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))

    @pytest.mark.parametrize("rank", [0, 32])
    def test_a_resumed_run_equals_an_uninterrupted_one(self, tmp_path, rank):
        if rank:
            pytest.importorskip("peft", reason="peft is not installed (the `lora` extra)")
        flags = f"""--device cpu --beta 0.2 --optimizer adamw8bit --lora-rank {rank} --prompts-per-step 1
            --num-generations 2 --max-completion-len 60 --eval-limit 0 --save-every 1 --num-steps 3
            --keep-checkpoints 9 --learning-rate 1e-3""".split()
        whole, cut = tmp_path / "whole", tmp_path / "cut"
        assert train_py([*flags, "--output-dir", str(whole)]) == 0
        shutil.copytree(whole, cut)
        for name in ("checkpoints/step-000003", "checkpoints/step-000002", "final"):
            shutil.rmtree(cut / name)
        assert train_py(["--resume", str(cut)]) == 0
        stored = [load_file(run / "checkpoints/step-000003/optimizer.safetensors") for run in (whole, cut)]
        assert any(tensor.dtype == torch.uint8 for tensor in stored[0].values())
        assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])
        weights = [(run / "final/model.safetensors").read_bytes() for run in (whole, cut)]
        assert weights[0] == weights[1]
