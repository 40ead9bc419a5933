"""Several processes: the losses, gradients, weights and files of one; what one does not get through, none does."""

# ruff: noqa: F811 (fixtures are imported, and arguments bear their names)

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from grpo import checkpoint, distributed, trainer
from grpo.config import UsageError, parse
from grpo.console import run_entry
from grpo.engines.vllm_memory import ModelSize, gpu_plan
from grpo.invariants import BrokenInvariant
from grpo.metrics import is_time
from grpo.rehearsal import rehearse
from grpo.run import make_trainer
from grpo.run import start as start_run
from grpo.trainer import Trainer
from scenarios.generator import held_out
from tests import processes, toy
from tests.test_resume import quick  # noqa: F401
from tests.test_run import arguments, history, train_py

CLOSE = 1e-5

# Three groups on two processes, microbatches of about two episodes, gradients that are clipped.
FLAGS = dict(
    device="cpu", beta=0.2, num_steps=4, prompts_per_step=3, num_generations=2, max_completion_len=16, save_every=2,
    eval_limit=2, learning_rate=1e-3, warmup_steps=1, lr_schedule="constant", microbatch_tokens=700, max_grad_norm=0.1,
)  # fmt: skip

CASES = {
    "three groups": {},
    "a process without a token to train": dict(prompts_per_step=1, kl_estimator="k1", gradient_checkpointing=True),
    "inner updates": dict(num_iterations=2, mismatch="token_clip", dynamic_sampling=1, loss_type="dapo"),
    "the anchor in the reward": dict(kl_in="reward", scale_rewards="batch"),
    "whole episodes, padded": dict(loss_type="gspo", packing="padded", beta=0),
    "adapters": dict(lora_rank=2),
}


def rewarded(group):
    episodes = (dataclasses.replace(each, reward=sum(each.completion_ids) % 7 / 7) for each in group.episodes)
    return dataclasses.replace(group, episodes=tuple(episodes))


@pytest.fixture(scope="module", autouse=True)
def rewards_with_spread():
    """The toy model earns nothing, so that there would be nothing to learn."""

    original = Trainer.sample_groups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "sample_groups", lambda self, step: [rewarded(each) for each in original(self, step)])
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The toy policy with and without a tied head."""
    folders = {}
    for tied in (True, False):
        folders[tied] = tmp_path_factory.mktemp("toy")
        toy.make_model(toy.make_tokenizer(), tie_word_embeddings=tied).save_pretrained(folders[tied])
        toy.make_tokenizer().save_pretrained(folders[tied])
    return folders


def flags(model, output, **changes):
    return arguments(model, output, **FLAGS | changes)


def settings(model, **changes):
    words = flags(model, "unused", **{name: value for name, value in changes.items() if value is not True})
    return parse(words + [f"--{name.replace('_', '-')}" for name, value in changes.items() if value is True], {})


# ----------------------------------------------------------------------------------------------------------- updates


def steps(models):
    """Two steps of each case: tokens, losses, the last gradients and weights."""
    found = {}
    for number, (name, changes) in enumerate(CASES.items()):
        made, _ = make_trainer(settings(models[number % 2 == 0], **changes))
        results = [made.step(i) for i in range(1, 3)]
        parameters = dict(made.policy.model.named_parameters())
        found[name] = {
            "ids": [[e.completion_ids for g in r.groups for e in g.episodes] for r in results],
            "advantages": torch.tensor([r.advantages for r in results]),
            "losses": [r.losses for r in results],
            "gradients": {n: distributed.full(p.grad) for n, p in parameters.items() if p.grad is not None},
            "weights": {n: distributed.full(p.detach()).clone() for n, p in parameters.items()},
        }
    return found


@pytest.fixture(scope="module")
def both(models, tmp_path_factory):
    """`steps` of one process and of two."""
    folder = tmp_path_factory.mktemp("steps")

    def work():
        with distributed.session():
            found = steps(models)
            if distributed.is_first():
                torch.save(found, folder / "two.pt")

    ended = processes.run(2, folder, work)
    assert ended.codes == [0, 0], ended.output
    return steps(models), torch.load(folder / "two.pt", weights_only=False)


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_weights_are_those_of_one_process(both, name):
    one, two = (found[name] for found in both)
    assert two["ids"] == one["ids"]
    torch.testing.assert_close(two["advantages"], one["advantages"], rtol=0, atol=CLOSE)
    length = max(len(ids) for step in one["ids"] for ids in step)
    for ours, expected in zip(two["losses"], one["losses"], strict=True):
        assert ours.keys() == expected.keys()
        for key, value in expected.items():
            # The sampler's rounding depends on who shares its batch, and a sequence's ratio adds up that of its tokens.
            close = length * CLOSE if key.startswith("sampler_gap/sequence") else CLOSE
            assert ours[key] == pytest.approx(value, rel=close, abs=close), key
    for what in ("gradients", "weights"):
        assert two[what].keys() == one[what].keys()
        for key, expected in one[what].items():
            torch.testing.assert_close(two[what][key], expected, rtol=0, atol=CLOSE)
    assert max(float(g.abs().max()) for g in one["gradients"].values()) > 100 * CLOSE  # it is about something
    assert one["losses"][-1]["grad_norm"] > FLAGS["max_grad_norm"]  # and clipped


def times_nan(loss, *rest):
    return loss * torch.nan, *rest


def test_a_step_that_is_not_finite_on_one_process_is_dropped_on_all(models, tmp_path):
    def work():
        with distributed.session():
            made, _ = make_trainer(settings(models[True]))
            made.step(0)
            before = [distributed.full(p.detach()).clone() for p in made.policy.model.parameters()]
            original = trainer.policy_loss
            if distributed.rank() == 1:
                trainer.policy_loss = lambda *args, **named: times_nan(*original(*args, **named))
            losses = made.step(1).losses
            after = [distributed.full(p.detach()) for p in made.policy.model.parameters()]
            assert losses["skipped_updates"] == 1 and all(map(torch.equal, before, after))
            trainer.policy_loss = original
            assert made.step(2).losses["skipped_updates"] == 0
            assert "4 episodes" in rehearse(made, held_out(1))  # two groups of two for this process

    ended = processes.run(2, tmp_path, work)
    assert ended.codes == [0, 0], ended.output


# -------------------------------------------------------------------------------------------------------- whole runs


def start(*args):
    run_entry(lambda: start_run([str(arg) for arg in args]))


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory):
    """The same run by one process and by two, and what the two said."""
    folder = tmp_path_factory.mktemp("runs")
    assert train_py(flags(models[True], folder / "one")) == 0
    ended = processes.run(2, folder / "said", partial(start, *flags(models[True], folder / "two")))
    assert ended.codes == [0, 0], ended.output
    return folder / "one", folder / "two", ended.output


def same(folder, expected):
    ours, theirs = (load_file(each / "final" / "model.safetensors") for each in (folder, expected))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=CLOSE)
    for row, wanted in zip(history(folder), history(expected), strict=True):
        assert row.keys() == wanted.keys()
        for key in row:
            close = row[key] is None if wanted[key] is None else row[key] == pytest.approx(wanted[key], CLOSE, CLOSE)
            assert close or is_time(key), (key, row[key], wanted[key])


def names(folder):
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return sorted(path for path in paths if not path.endswith(".safetensors") or not path.startswith("checkpoints"))


def test_two_processes_write_what_one_writes_and_the_first_one_speaks(runs):
    one, two, output = runs
    same(two, one)
    assert names(two) == names(one)
    for file in ("final/config.json", "final/generation_config.json"):
        assert (two / file).read_text() == (one / file).read_text()
    assert [json.loads((each / "eval_after.json").read_text())["avg_score"] for each in (one, two)][0] is not None
    for file in ("eval_before.json", "completions/step_00004.jsonl"):
        assert len((two / file).read_text()) == len((one / file).read_text())
    assert "step 4/4" in output[0] and output[1] == ""


def cut(folder, target):
    """A copy of a run as it was after step 2."""
    shutil.copytree(folder, target)
    for path in ("checkpoints/step-000004", "final", "rollouts"):
        shutil.rmtree(target / path)
    for path in target.glob("eval_after.json"):
        path.unlink()
    return target


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1), (2, 3)])
def test_a_checkpoint_is_continued_by_another_number_of_processes(runs, tmp_path, before, now):
    folder = cut(runs[before - 1], tmp_path / "run")
    [point] = checkpoint.finished(folder)
    assert len(list(point.glob("shard-*"))) == (before if before > 1 else 0)
    if now == 1:
        assert train_py(["--resume", str(folder)]) == 0
    else:
        ended = processes.run(now, tmp_path / "said", partial(start, "--resume", folder))
        assert ended.codes == [0] * now, ended.output
        assert f"processes {before} -> {now}" in ended.output[0]
    same(folder, runs[0])


def test_a_damaged_shard_is_named_and_the_checkpoint_before_it_used(runs, tmp_path):
    folder = Path(shutil.copytree(runs[1], tmp_path / "run"))
    for path in ("final", "rollouts"):
        shutil.rmtree(folder / path)
    shard = sorted((folder / "checkpoints" / "step-000004").glob("shard-00002*"))[0]
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    ended = processes.run(2, tmp_path / "said", partial(start, "--resume", folder))
    assert ended.codes == [0, 0] and f"{shard.name}: other bytes" in ended.output[0]
    same(folder, runs[0])


# ------------------------------------------------------------------------------------------------- signals and faults


def at_step(number, rank, action):
    """`train.py` in which process `rank` does something when step `number` is sampled."""

    def work(*args):
        original = Trainer.train_on

        def train_on(self, step, groups, watch):
            if step + 1 == number and distributed.rank() == rank:
                action()
            return original(self, step, groups, watch)

        Trainer.train_on = train_on
        start(*args)

    return work


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_one_process_lets_all_finish_the_step(models, runs, tmp_path, number, code):
    folder = tmp_path / "run"
    work = partial(at_step(2, 1, lambda: signal.raise_signal(number)), *flags(models[True], folder, save_every=0))
    ended = processes.run(2, tmp_path / "said", work)
    assert ended.codes == [code, code], ended.output
    assert [path.name for path in checkpoint.finished(folder)] == ["step-000002"] and len(history(folder)) == 2
    assert f"--resume {folder}" in ended.output[0]
    assert processes.run(2, tmp_path / "again", partial(start, "--resume", folder)).codes == [0, 0]
    same(folder, runs[0])


def fails():
    raise ValueError("a fault of this process")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_fails_ends_all_and_says_why_once(models, tmp_path, rank):
    work = partial(at_step(2, rank, fails), *flags(models[True], tmp_path / "run", eval_limit=0))
    ended = processes.run(2, tmp_path / "said", work, limit=60)
    assert ended.codes == [1, 1]
    assert ended.output[rank].count("ValueError: a fault of this process") == 1, ended.output
    assert "fault" not in ended.output[1 - rank] and "Traceback" not in ended.output[1 - rank]


def test_a_process_that_is_killed_ends_all_in_one_line(models, tmp_path):
    work = partial(at_step(2, 1, lambda: os.kill(os.getpid(), signal.SIGKILL)), *flags(models[True], tmp_path / "run"))
    ended = processes.run(2, tmp_path / "said", work, limit=60)
    assert ended.codes == [1, -9]
    assert "error: process 0 of 2: another one has died" in ended.output[0] and "Traceback" not in ended.output[0]


def test_a_rollout_that_fails_on_one_process_is_raised_on_all(models, tmp_path):
    def work(*args):
        original = Trainer.audit

        def audit(self, groups, witness=None):
            if witness is not None and distributed.rank() == 1:
                raise BrokenInvariant("a broken invariant")
            original(self, groups, witness)

        Trainer.audit = audit
        start(*args)

    ended = processes.run(2, tmp_path / "said", partial(work, *flags(models[True], tmp_path / "run", eval_limit=0)))
    assert ended.codes == [1, 1]
    assert [output.count("BrokenInvariant: step 1: a broken invariant") for output in ended.output] == [1, 0]
    [dump] = (tmp_path / "run" / "dumps").iterdir()
    assert f"python -m grpo.replay {dump}" in ended.output[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(beta=-1), "--beta -1"),
        (dict(device="cuda:0"), "--device cuda:0: with several processes"),
        (dict(tensor_parallel=3, engine="vllm"), "--tensor-parallel 3: must divide"),
        (dict(tensor_parallel=2, engine="torch"), "--tensor-parallel 2: is vLLM's"),
        (dict(optimizer="adamw8bit"), "--optimizer adamw8bit: runs in one process only"),
    ],
)
def test_bad_input_is_one_line_of_one_process(models, tmp_path, changes, message):
    ended = processes.run(2, tmp_path / "said", partial(start, *flags(models[True], tmp_path / "run", **changes)))
    assert ended.codes == [2, 2]
    said = [line for output in ended.output for line in output.splitlines()]
    assert len(said) == 1 and said[0].startswith(f"error: {message}") and not (tmp_path / "run").exists()


def test_a_folder_that_is_taken_is_refused_by_all(models, runs, tmp_path):
    ended = processes.run(2, tmp_path / "said", partial(start, *flags(models[True], runs[0])))
    assert ended.codes == [2, 2] and "".join(ended.output).count("holds another run") == 1


def test_torchrun_itself(models, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "train.py", *flags(models[True], tmp_path / "run", num_steps=1, eval_limit=0)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len(history(tmp_path / "run")) == 1 and done.stdout.count("GRPO: ask before you act") == 1


# -------------------------------------------------------------------------------------------------------- one process


def test_one_process_makes_no_group_and_no_copy(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    model = torch.nn.Linear(2, 2)
    with distributed.session(), distributed.whole(model):
        assert not torch.distributed.is_initialized() and distributed.size() == 1 and distributed.is_first()
        assert distributed.first(lambda: model) is model and distributed.full(model.weight) is model.weight
        distributed.shard(model, torch.device("cpu"))
        assert type(model) is torch.nn.Linear
    with pytest.raises(UsageError):
        distributed.first(parse, ["--beta", "-1"])


def test_one_process_refuses_tensor_parallelism(models):
    with pytest.raises(UsageError, match="--tensor-parallel 2: must divide the number of processes, which is 1"):
        make_trainer(settings(models[True], tensor_parallel=2, engine="vllm"))


def test_what_is_sharded_leaves_room_for_vllm():
    size = ModelSize(parameters=7 * 10**9, layers=32, hidden=4096, query=4096, key=1024, mlp=11008)
    plan = partial(gpu_plan, 80 * 2**30, size, torch.bfloat16, max_context=2048, min_context=500, episodes=16,
                   update_tokens=1000, trained=size.parameters, reference=True)  # fmt: skip
    with pytest.raises(UsageError, match="too small"):
        plan()
    alone, spread = plan(processes=8), plan(processes=8, tensor_parallel=4)
    assert spread.gpu_memory < 0.5 * alone.gpu_memory


def test_groups_are_dealt_whole_the_largest_first(monkeypatch):
    monkeypatch.setattr(distributed, "size", lambda: 2)
    episodes = [SimpleNamespace(prompt_ids=(0,) * 5, completion_ids=(0,) * length) for length in (9, 1, 30, 2, 8, 3)]
    groups = [SimpleNamespace(episodes=episodes[i : i + 2]) for i in (0, 2, 4)]
    for rank, expected in ((0, [0, 0, 1, 1, 0, 0]), (1, [1, 1, 0, 0, 1, 1])):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        assert distributed.owned(groups, [1.0] * 6) == expected
    # What is not trained costs nothing: without it the third group is the largest.
    monkeypatch.setattr(distributed, "rank", lambda: 0)
    assert distributed.owned(groups, [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]) == [0, 0, 0, 0, 1, 1]
