"""Weights on their way to vLLM: in the right order, all of them, noticed where not; and training through it."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo import run
from grpo.config import RunStopped
from grpo.engines import TurnRequest
from grpo.engines.vllm_sync import canary_logprobs, canary_tolerance
from grpo.engines.vllm_tensors import named_weights
from grpo.sampling import SamplingConfig
from grpo.trainer import Trainer
from scenarios.generator import held_out
from tests import toy
from tests.vllm_engine.helpers import PROMPT, SKIPPED, installed, sampled, settings_for, trainers, turns

if not installed():
    pytest.skip(SKIPPED, allow_module_level=True)
from grpo.engines import vllm_engine  # noqa: E402 (it needs vLLM)

ROOT = Path(__file__).parents[2]


def one_turn(engine, prompt=PROMPT, max_tokens=1, **options):
    return turns(engine, [TurnRequest((0, 0), prompt, max_tokens, **options)])[0, 0]


def edit(policy, name, change):
    with torch.no_grad():
        change(policy.model.get_parameter(name))


def favour_token_7(policy):
    """Move the head's row 7 to where the hidden state of PROMPT's last token points."""
    with torch.no_grad():
        hidden = policy.model.get_decoder()(torch.tensor([PROMPT]), use_cache=False).last_hidden_state[0, -1]
        policy.model.get_output_embeddings().weight[7] = hidden


GREEDY = SamplingConfig(temperature=0.0)


def test_an_edited_head_is_seen_by_the_very_next_generation(engine, policy):
    engine.start(0, GREEDY)
    assert one_turn(engine).token_ids != (7,)
    favour_token_7(policy)
    engine.weights_changed()
    engine.start(0, GREEDY)
    assert one_turn(engine).token_ids == (7,)
    assert 7 not in PROMPT


def after_an_edit(engine, policy):
    """The same prompt before and after an edit of a layer that the prompt's keys and values pass through: how far the
    log-prob of what is sampled afterwards is from the trainer's."""
    prompt = PROMPT * 3  # several blocks
    engine.start(0, GREEDY)
    one_turn(engine, prompt)
    edit(policy, "model.layers.0.self_attn.v_proj.weight", lambda weight: weight.mul_(-1.0))
    engine.weights_changed()
    engine.start(0, GREEDY)
    output = one_turn(engine, prompt)
    return abs(output.logprobs[0] - canary_logprobs(policy, prompt + output.token_ids)[-1])


def test_prefixes_cached_with_older_weights_are_not_read(engine, policy):
    assert after_an_edit(engine, policy) < 1e-3


def test_without_the_reset_they_would_be(engine, policy, monkeypatch):
    monkeypatch.setattr(engine, "forget_prefixes", lambda: None)
    monkeypatch.setattr(vllm_engine, "check_canary", lambda *args: None)
    assert after_an_edit(engine, policy) > 1e-2


def test_the_canary_notices_a_forgotten_reset(engine, policy, monkeypatch):
    monkeypatch.setattr(engine, "forget_prefixes", lambda: None)
    edit(policy, "model.layers.0.self_attn.v_proj.weight", lambda weight: weight.mul_(-1.0))
    engine.weights_changed()
    with pytest.raises(RunStopped, match="no tensor's checksum differs"):
        engine.wake()


def test_the_canary_passes_with_room(engine, policy):
    """Rounding is far below the tolerance, and the tolerance far below what a wrong tensor does."""
    ids, actual = engine._canary_logprobs()
    expected = canary_logprobs(policy, ids)
    gap = sum(abs(a - b) for a, b in zip(actual, expected)) / len(expected)
    bound = canary_tolerance(policy.model.config, torch.float32, expected)
    assert len(expected) == len(ids) - 1 >= 64
    assert gap < bound / 5 and bound < 1e-3


def corrupt(monkeypatch, name, change):
    """Something happens to one tensor between the trainer and vLLM; `change` gives what is sent, None for nothing."""

    def weights(model):
        for key, tensor in named_weights(model):
            sent = change(tensor) if key == name else tensor
            if sent is not None:
                yield key, sent

    monkeypatch.setattr(vllm_engine, "named_weights", weights)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.3.mlp.down_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.norm.weight",
    ],
)
def test_a_corrupted_tensor_stops_the_run_and_is_named(engine, monkeypatch, name):
    corrupt(monkeypatch, name, lambda tensor: tensor * 1.1)
    engine.weights_changed()
    with pytest.raises(RunStopped) as error:
        engine.start(0)
    assert f"1 tensors differ, first {name}" in str(error.value) and "\n" not in str(error.value)


def test_a_tensor_that_was_not_sent_stops_the_run_and_is_named(engine, policy, monkeypatch):
    name = "model.layers.1.mlp.down_proj.weight"
    edit(policy, name, lambda weight: weight.add_(0.05))
    corrupt(monkeypatch, name, lambda tensor: None)
    engine.weights_changed()
    with pytest.raises(RunStopped, match=f"first {name}"):
        engine.wake()


def test_a_change_too_small_for_log_probs_is_noticed_by_checksums(engine, policy, monkeypatch):
    name = "model.layers.2.self_attn.q_proj.weight"
    corrupt(monkeypatch, name, lambda tensor: tensor + 1e-5)
    engine.weights_changed()
    with pytest.raises(RunStopped, match=f"1 tensors differ, first {name}"):
        engine.wake()


def test_a_tied_head_that_keeps_its_old_copy_stops_the_run(engine, policy, monkeypatch):
    """On a CPU vLLM's own loading leaves a tied head as it was."""
    monkeypatch.setattr(vllm_engine, "repack_heads", lambda model: None)
    favour_token_7(policy)
    engine.weights_changed()
    with pytest.raises(RunStopped, match="1 tensors differ, first lm_head.weight"):
        engine.wake()


def test_after_a_failed_sync_the_next_wake_sends_again(engine, monkeypatch):
    with monkeypatch.context() as patch:
        corrupt(patch, "model.norm.weight", lambda tensor: tensor * 2)
        engine.weights_changed()
        with pytest.raises(RunStopped):
            engine.wake()
    engine.wake()
    assert one_turn(engine).token_ids


class Recorder:
    """vLLM, with the order of calls that concern weights and memory."""

    def __init__(self, llm):
        self.llm, self.calls = llm, []

    def __getattr__(self, name):
        value = getattr(self.llm, name)
        if name not in ("sleep", "wake_up", "collective_rpc", "reset_prefix_cache", "generate"):
            return value

        def call(*args, **options):
            said = name if name != "collective_rpc" else args[0]
            tags = options.get("tags") or ([f"level {options['level']}"] if "level" in options else [])
            self.calls.append(" ".join([said, *tags]))
            return value(*args, **options)

        return call


SYNC = ["reload_weights", "reset_prefix_cache"]
CANARY = ["generate", "generate"]


@pytest.fixture
def recorder(engine, monkeypatch):
    recorder = Recorder(engine.llm)
    monkeypatch.setattr(engine, "llm", recorder)
    return recorder


def test_order_of_calls_without_sleep(engine, recorder):
    """generate, update, generate, generate: one sync, and only where an update was."""
    one_turn(engine)
    engine.weights_changed()
    engine.start(1)
    one_turn(engine)
    engine.sleep()
    engine.start(2)
    assert recorder.calls == [*SYNC, *CANARY]


def test_order_of_calls_with_sleep(engine, recorder):
    """On a CPU vLLM keeps its memory, but goes through the states: scheduling stops until everything is awake."""
    engine.plan = dataclasses.replace(engine.plan, sleep_level=2)
    engine.sleep()
    engine.sleep()
    engine.weights_changed()
    engine.wake()
    engine.wake()
    awake = ["wake_up weights", *SYNC, "wake_up kv_cache", *CANARY]
    assert recorder.calls == ["sleep level 2", *awake]
    recorder.calls.clear()
    assert one_turn(engine).token_ids
    engine.sleep()
    engine.start(1)  # an evaluation, with no update in between: what sleep dropped is sent again
    assert recorder.calls == ["sleep level 2", *awake]
    assert one_turn(engine).token_ids


def test_a_running_request_never_sees_two_sets_of_weights(engine, policy):
    engine.submit(TurnRequest((0, 0), PROMPT, max_tokens=50))
    engine.step()
    engine.weights_changed()
    engine.wake()
    assert engine.step() == [] and not engine.llm.llm_engine.has_unfinished_requests()


# ------------------------------------------------------------------------------------------------------------ training


def make_trainer(settings, policy, chat, engine):
    packing = run.make_packing(settings, policy, chat, engine.max_context)
    return Trainer(settings, policy, engine, chat, None, packing)


def test_three_grpo_steps_with_log_probs_that_follow_the_weights(engine, policy, chat, settings):
    trainer = make_trainer(settings, policy, chat, engine)
    prompt = list(PROMPT * 2)
    before = canary_logprobs(policy, prompt)
    for step in range(3):
        result = trainer.step(step)
        assert result.losses["sampler_gap/max"] < 1e-3
        assert abs(result.losses["sampler_gap/sequence_ratio_max"] - 1) < 1e-2
        assert result.seconds.keys() >= {"sync", "rollout", "update"}
        for group in result.groups:
            assert all(len(sampled(episode)) == episode.num_trained for episode in group.episodes)
    engine.wake()
    after = canary_logprobs(policy, prompt)
    assert max(abs(a - b) for a, b in zip(before, after)) > 0.05
    episode = trainer.sample_groups(3)[0].episodes[0]
    assert sampled(episode) == pytest.approx(trainers(policy, episode), abs=1e-3)


def test_a_trainer_that_says_nothing_of_its_updates_shows_in_the_gap(engine, policy, chat, settings, monkeypatch):
    monkeypatch.setattr(engine, "weights_changed", lambda: None)
    trainer = make_trainer(settings, policy, chat, engine)
    gaps = [trainer.step(step).losses["sampler_gap/max"] for step in range(2)]
    assert gaps[0] < 1e-3 < 1e-2 < gaps[1]


def test_adapters_reach_vllm_merged(engine, settings):
    pytest.importorskip("peft", reason="peft is not installed")
    base = canary_logprobs(engine.policy, PROMPT)
    adapted = run.load_policy(settings.with_values({"lora_rank": 4}).model)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if ".lora_B." in name:  # zero at the start, when adapters add nothing
                parameter.normal_(std=0.05)
    engine.policy = adapted
    engine.weights_changed()
    engine.start(0, GREEDY)  # the canary compares with the adapted policy
    output = one_turn(engine)
    expected = canary_logprobs(adapted, PROMPT + output.token_ids)
    assert output.logprobs[0] == pytest.approx(expected[-1], abs=1e-3)
    assert max(abs(a - b) for a, b in zip(base, expected)) > 0.1


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    """A second vLLM, on a random model with a head of its own, whose weights are sent in bfloat16. It lives as long as
    the session: closing one vLLM closes the process groups that all in a process share."""
    folder = tmp_path_factory.mktemp("untied")
    tokenizer = toy.make_tokenizer()
    toy.make_model(tokenizer, tie_word_embeddings=False, head_dim=32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = settings_for(folder, dtype="bfloat16", max_completion_len=64)
    policy = run.load_policy(settings.model)
    return policy, run.make_engine(settings, policy, run.make_chat(policy), held_out(5))


def test_untied_heads_and_16_bit_weights(untied):
    policy, engine = untied
    assert "lm_head.weight" in dict(named_weights(policy.model))
    engine.start(0, GREEDY)
    assert one_turn(engine).token_ids != (7,)
    favour_token_7(policy)
    edit(policy, "lm_head.weight", lambda weight: weight[7].mul_(3.0))
    engine.weights_changed()
    engine.start(0, GREEDY)
    assert one_turn(engine).token_ids == (7,)


def test_train_py(settings, tmp_path):
    """The command itself, in a process of its own: evaluation, steps, final model."""
    folder = tmp_path / "run"
    flags = f"--engine vllm --model {settings.model.model} --num-steps 2 --beta 0.2 --eval-limit 3 --device cpu"
    flags += f" --prompts-per-step 2 --num-generations 4 --save-every 1 --output-dir {folder}"
    done = subprocess.run(
        [sys.executable, "train.py", *flags.split()],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "vllm 0.32" in done.stdout and "no sleep mode on a CPU" in done.stdout
    rows = json.loads((folder / "log_history.json").read_text())
    assert len(rows) == 2 and all(row["sampler_gap/max"] < 1e-3 for row in rows)
    assert all(row["time/sync"] > 0 for row in rows)
    assert (folder / "final" / "model.safetensors").exists() and (folder / "eval_after.json").exists()
