"""Rollout records give back exactly what was sampled; a recorded step can be trained on again to the logged loss."""

import dataclasses
import gzip
import math
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_model

from env.clarify import EpisodeRecord, Question, StopReason
from grpo import replay, rollout_record, trainer
from grpo.config import UsageError
from grpo.console import run_entry
from grpo.data_types import Episode, Group, Turn
from grpo.rollout_record import DamagedRecord
from scenarios.generator import training_scenario
from tests.test_resume import TINY, history, quick, start  # noqa: F401 (quick is a fixture)

# --------------------------------------------------------------------------------------------------- rollout records

texts = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates and NUL too
plans = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
questions = st.builds(Question, texts, texts, st.none() | texts)


@st.composite
def groups(draw):
    scenario = training_scenario(0, draw(st.integers(0, 50)))
    episodes = []
    for member in range(draw(st.integers(0, 3))):
        length = draw(st.integers(0, 6))
        reason = draw(st.sampled_from(StopReason))
        record = EpisodeRecord(
            scenario=draw(st.sampled_from([scenario, training_scenario(1, 3)])),
            questions=tuple(draw(st.lists(questions, max_size=2))),
            plan=draw(plans),
            num_turns=draw(st.integers(0, 9)),
            num_invalid_turns=draw(st.integers(0, 9)),
            stop_reason=draw(st.sampled_from([reason, None])),
        )
        episodes.append(
            Episode(
                prompt_ids=tuple(draw(st.lists(st.integers(0, 2**31), max_size=4))),
                completion_ids=tuple(draw(st.lists(st.integers(0, 2**31), min_size=length, max_size=length))),
                loss_mask=tuple(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))),
                sampler_logprobs=tuple(draw(st.lists(st.floats(), min_size=length, max_size=length))),
                turns=(Turn(0, length, draw(texts), draw(st.none() | texts)),),
                stop_reason=reason,
                record=record,
                reward=draw(st.none() | st.floats(allow_nan=False)),
                member=member,
            )
        )
    return Group(scenario, tuple(episodes))


def bits(value):
    """Something that is equal only where every float is the same bit for bit (any NaN is as good as another)."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("d", value)
    if dataclasses.is_dataclass(value):
        return type(value), tuple(bits(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, dict):
        return [(key, bits(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [bits(item) for item in value]
    return type(value), value


@settings(max_examples=200, deadline=None)
@given(st.lists(groups(), max_size=2))
def test_a_record_gives_back_the_same_groups_bit_for_bit(tmp_path_factory, batch):
    path = tmp_path_factory.getbasetemp() / "record.json.gz"
    rollout_record.save(path, batch, step=3, run_id="a")
    record = rollout_record.load(path)
    assert bits(record.groups) == bits(batch)
    assert record.about == {"step": 3, "run_id": "a"}


def test_two_halves_of_a_surrogate_pair_stay_two(tmp_path):
    scenario = training_scenario(0, 0)
    record = EpisodeRecord(scenario, (Question("\ud83d\ude00", "\0", None),), stop_reason=StopReason.ENV_ERROR)
    episode = Episode((1,), (), (), (), (), StopReason.ENV_ERROR, record, None)
    rollout_record.save(tmp_path / "x.json.gz", [Group(scenario, (episode,))])
    assert len(rollout_record.load(tmp_path / "x.json.gz").groups[0].episodes[0].record.questions[0].text) == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"junk", gzip.compress(b"[]"), gzip.compress(b'{"format": 2}'), gzip.compress(b"\xff"), pickle.dumps({}),
     gzip.compress(b"[" * 100_000), gzip.compress(b'{"format":1,"about":{},"groups":[{"scenario":1,"episodes":[]}]}')],
    ids=range(8),  # gzip puts the time into its header, and several processes must find tests of the same names
)  # fmt: skip
def test_what_is_no_record_is_named(tmp_path, content):
    path = tmp_path / "x.json.gz"
    path.write_bytes(content)
    with pytest.raises(DamagedRecord, match="x.json.gz: not a rollout record, or damaged"):
        rollout_record.load(path)


def test_a_record_with_one_byte_changed_is_damaged(finished, tmp_path):
    content = bytearray(record_of(finished, 1).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "x.json.gz").write_bytes(content)
    with pytest.raises(DamagedRecord):
        rollout_record.load(tmp_path / "x.json.gz")


# ------------------------------------------------------------------------------------------------------------- replay


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run whose base is still among its `keep_checkpoints`, so that the rollouts of all steps are there."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert start(folder, eval_limit=0, save_every=3, keep_checkpoints=3) == 0
    return folder


def record_of(folder, step):
    return folder / "rollouts" / f"step-{step:06d}.json.gz"


@pytest.mark.parametrize("step", [1, 3, 4])  # at the base, behind two repeated steps, behind a checkpoint
def test_a_recorded_step_has_its_logged_loss_again(finished, step):
    replayed = replay.replay(record_of(finished, step))
    logged = history(finished)[step - 1]
    assert abs(replayed.losses["loss"] - logged["loss"]) <= 1e-6
    assert abs(replayed.losses["kl"] - logged["kl"]) <= 1e-6
    assert abs(replayed.losses["grad_norm"] - logged["grad_norm"]) <= 1e-6
    assert replayed.logged == logged and replayed.not_finite == {} and replayed.broken is None


def test_a_step_of_adapters_has_its_logged_loss_again(tmp_path):
    pytest.importorskip("peft", reason="peft is not installed (the `lora` extra)")
    assert start(tmp_path / "run", eval_limit=0, save_every=1, num_steps=2, keep_checkpoints=3, lora_rank=2) == 0
    for step in (1, 2):
        replayed = replay.replay(record_of(tmp_path / "run", step))
        logged = history(tmp_path / "run")[step - 1]
        assert abs(replayed.losses["loss"] - logged["loss"]) <= 1e-6 and replayed.not_finite == {}
        assert abs(replayed.losses["grad_norm"] - logged["grad_norm"]) <= 1e-6


def test_with_other_weights_it_has_another_loss(finished):
    """So the agreement with the log is none of numbers that agree with anything."""
    logged = history(finished)[3]
    at_base = replay.replay(record_of(finished, 4), weights="base")
    assert abs(at_base.losses["loss"] - logged["loss"]) > 1e-5
    there = replay.replay(record_of(finished, 4), weights=str(finished / "checkpoints" / "step-000003"))
    assert abs(there.losses["loss"] - logged["loss"]) <= 1e-6


def test_a_moved_record_is_trained_on_at_the_base_and_says_so(finished, tmp_path, capsys):
    shutil.copy(record_of(finished, 1), tmp_path / "x.json.gz")
    replay.main([str(tmp_path / "x.json.gz")])
    printed = capsys.readouterr().out
    assert "weights: those of the base: the record does not lie in its run's folder" in printed
    loss = next(line for line in printed.splitlines() if line.startswith("loss ")).split()
    assert abs(float(loss[1]) - history(finished)[0]["loss"]) <= 1e-6
    assert "every weight, module output and gradient was finite" in printed


def test_a_gap_in_the_records_is_named(finished, tmp_path):
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    shutil.rmtree(copy / "checkpoints")
    record_of(copy, 2).unlink()
    replayed = replay.replay(record_of(copy, 3))
    assert "not of step 2" in replayed.weights and "step-000002.json.gz is missing" in replayed.weights
    assert replayed.losses["kl"] > 0  # not taken for the base: one step was made


def test_settings_of_a_gpu_are_replayed_on_a_cpu(finished, tmp_path):
    record = rollout_record.load(record_of(finished, 1))
    config = record.about["config"] | {"device": "cuda", "impl": "triton", "engine": "vllm", "dtype": "auto"}
    rollout_record.save(tmp_path / "x.json.gz", record.groups, **record.about | {"config": config})
    assert abs(replay.replay(tmp_path / "x.json.gz").losses["loss"] - history(finished)[0]["loss"]) <= 1e-6


def test_it_names_the_tensors_that_are_not_finite_and_none_that_is(finished, tmp_path, capsys):
    made, _ = replay.make_trainer(replay.replay_settings(TINY, "cpu"), replay.NoEngine(500))
    model = made.policy.model
    layers = len(model.model.layers)
    with torch.no_grad():
        model.model.layers[layers - 1].mlp.down_proj.weight[0, 0] = math.nan
    save_model(model, str(tmp_path / "weights.safetensors"))
    replayed = replay.replay(record_of(finished, 1), weights=str(tmp_path / "weights.safetensors"))
    name = f"model.layers.{layers - 1}.mlp.down_proj"
    assert replayed.not_finite["weights before the step"] == [f"{name}.weight"]
    assert replayed.not_finite["outputs of modules, first one first"][0] == name
    assert "one inner update" in replayed.weights
    assert replayed.losses["skipped_updates"] == 1 and replayed.not_finite["gradients"]
    assert replayed.not_finite["weights after the step"] == [f"{name}.weight"]  # the update was dropped
    replay.show(replayed)
    assert f"not finite: weights before the step: {name}.weight" in capsys.readouterr().out


def test_a_gradient_that_is_not_finite_is_named_before_clipping_spreads_it(finished, monkeypatch):
    def poisoned(policy, batch, **options):
        loss, metrics, logprobs = original(policy, batch, **options)
        return loss + policy.model.model.norm.weight.sum() * math.inf, metrics, logprobs

    original = trainer.policy_loss
    monkeypatch.setattr(trainer, "policy_loss", poisoned)
    replayed = replay.replay(record_of(finished, 1))
    assert replayed.not_finite == {"gradients": ["model.norm.weight"]}
    assert not math.isfinite(replayed.losses["grad_norm"])


def test_a_dropped_step_is_replayed_from_its_dump(tmp_path, monkeypatch):
    def poisoned(policy, batch, **options):
        loss, *rest = original(policy, batch, **options)
        return loss * math.nan, *rest

    def update(self, step, *args):
        with pytest.MonkeyPatch.context() as patch:
            if step == 2:
                patch.setattr(trainer, "policy_loss", poisoned)
            return original_update(self, step, *args)

    original, original_update = trainer.policy_loss, trainer.Trainer.update
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "update", update)
        assert start(tmp_path / "run", eval_limit=0, num_iterations=1) == 0
    (dump,) = (tmp_path / "run" / "dumps").glob("*.json.gz")
    replayed = replay.replay(dump)
    assert "weights_step_00003" in replayed.weights and replayed.step == 3
    assert replayed.logged["loss"] is None and math.isfinite(replayed.losses["loss"])
    # The weights have moved from the base, and the reference is the base, though no optimiser state says so.
    assert replayed.losses["kl"] > 1e-7
    same = replay.replay(record_of(tmp_path / "run", 3))
    assert same.losses["loss"] == pytest.approx(replayed.losses["loss"], abs=1e-6)


def test_a_batch_that_breaks_an_invariant_is_shown_as_that(finished, tmp_path, capsys):
    record = rollout_record.load(record_of(finished, 1))
    first = record.groups[0].episodes[0]
    broken = dataclasses.replace(first, sampler_logprobs=(math.nan, *first.sampler_logprobs[1:]))
    group = dataclasses.replace(record.groups[0], episodes=(broken, *record.groups[0].episodes[1:]))
    rollout_record.save(tmp_path / "x.json.gz", [group, *record.groups[1:]], **record.about)
    replay.main([str(tmp_path / "x.json.gz")])
    printed = capsys.readouterr().out
    assert "broken invariant: " in printed and "not finite: sampler log-probs of episodes: 0\n" in printed


@pytest.mark.parametrize(
    ("problem", "said"),
    [("missing", "x.json.gz: No such file"), ("junk", "x.json.gz: not a rollout record"),
     ("no config", "x.json.gz: says nothing usable of its step and settings"),
     ("config of another kind", "x.json.gz: says nothing usable of its step and settings"),
     ("no such step", "x.json.gz: says nothing usable of its step and settings"),
     ("other version", "x.json.gz: of another version of this program (unknown setting 'a_knob_of_old')"),
     ("weights", "nothing.safetensors: not weights of"), ("damaged checkpoint", "--weights: ")],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(finished, tmp_path, capsys, problem, said):
    path, more = tmp_path / "x.json.gz", []
    record = rollout_record.load(record_of(finished, 1))
    if problem == "junk":
        path.write_bytes(b"junk")
    elif problem == "no config":
        rollout_record.save(path, record.groups, step=1)
    elif problem == "config of another kind":
        rollout_record.save(path, record.groups, step=1, config=[])
    elif problem == "no such step":
        rollout_record.save(path, record.groups, **record.about | {"step": float("inf")})
    elif problem == "other version":
        rollout_record.save(path, record.groups, step=1, config={"a_knob_of_old": 1})
    elif problem != "missing":
        rollout_record.save(path, record.groups, **record.about)
    if problem == "weights":
        more = ["--weights", str(tmp_path / "nothing.safetensors")]
    elif problem == "damaged checkpoint":
        copy = shutil.copytree(finished / "checkpoints" / "step-000003", tmp_path / "step-000003")
        (copy / "model.safetensors").write_bytes(b"junk")
        more = ["--weights", str(copy)]
    with pytest.raises(SystemExit) as exit_:
        run_entry(lambda: replay.main([str(path), *more]))
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    assert said in error and str(tmp_path) in error


def test_a_run_s_damaged_record_between_is_named(finished, tmp_path):
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    shutil.rmtree(copy / "checkpoints")
    record_of(copy, 2).write_bytes(b"junk")
    with pytest.raises(UsageError, match="step-000002.json.gz"):
        replay.replay(record_of(copy, 3))
