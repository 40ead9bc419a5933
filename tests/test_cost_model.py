"""The cost model: counts by hand and by transformers, limits that can fail, figures that were not fitted, the page."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import cost_check  # noqa: E402
import cost_job  # noqa: E402
import cost_model  # noqa: E402
import cost_report  # noqa: E402
import episodes  # noqa: E402
from cost_machines import GIB, MACHINES, Machine  # noqa: E402
from cost_model import SHAPES, Lengths, Shape, Work  # noqa: E402

SMALL = Shape("small", layers=2, hidden=8, heads=4, key_heads=2, head_dim=4, mlp=16, vocab=32, tied=True)
PLAIN = Machine("plain", flops=1e3, bandwidth=1e2, memory=1e12, logit_bytes=0, decode_seconds=0.0, row_seconds=0.0,
                layer_seconds=0.0, nvlink=10.0, nic=1.0, hop_seconds=0.5, reduce_seconds=0.25)  # fmt: skip
EVEN = Lengths(np.array([40.0]), np.array([60.0]))
PAGE = cost_report.PAGE.read_text()


def config_of(shape: Shape):
    kind = Qwen3Config if shape.qk_norm else LlamaConfig
    return kind(vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.mlp,
                num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads,
                head_dim=shape.head_dim, tie_word_embeddings=shape.tied)  # fmt: skip


@pytest.mark.parametrize("shape", [*SHAPES.values(), SMALL], ids=lambda shape: shape.name)
def test_parameters_are_those_of_transformers(shape):
    """Of a model of three layers, built without memory, and what three are to all."""
    three = dataclasses.replace(shape, layers=3)
    config = config_of(three)
    with torch.device("meta"):
        model = (Qwen3ForCausalLM if shape.qk_norm else LlamaForCausalLM)(config)
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert three.parameters == sum(p.numel() for p in model.parameters())
    assert shape.parameters == three.parameters + (shape.layers - 3) * layer
    assert three.layer_matrices == sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2)
    assert Shape.of(shape.name, config) == three


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "70B"])
def test_sizes_are_what_the_models_are_called(name):
    assert SHAPES[name].parameters / 1e9 == pytest.approx(float(name[:-1]), rel=0.06)


def test_flops_are_those_that_torch_counts():
    """GEMMs of 10 tokens; attention of 10 x 10 pairs, as masked ones are multiplied too where nothing is fused."""
    config = config_of(SMALL)
    config._attn_implementation = "eager"
    model = Qwen3ForCausalLM(config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(10)[None])
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    gemms, attention = cost_model.layers_flops(SMALL, 10, 100)
    assert gemms + cost_model.head_flops(SMALL, 10, 1) == counts["aten.mm"]
    assert attention == counts["aten.bmm"]


def test_flops_by_hand():
    # q and o 8 x 16 each, k and v 8 x 8, three of 8 x 16 in the MLP, two layers
    assert SMALL.matrices == 2 * (2 * 128 + 2 * 64 + 3 * 128) == 1536
    assert cost_model.layers_flops(SMALL, 10, 100) == (2 * 1536 * 10, 4 * 2 * 16 * 100)
    assert cost_model.head_flops(SMALL, 5, 3) == 3 * 2 * 32 * 8 * 5
    assert SMALL.kv_bytes(2) == 2 * 2 * 8 * 2


def test_phases_by_hand():
    """1000 FLOP/s, 100 bytes/s."""
    load = Work(unique=10, pairs=100, reference=6, reference_pairs=80, prompts=4, trained=5)
    made = cost_model.made_bytes(SMALL)
    assert made == 2 * (32 * 8 + 20 * (16 + 8) + 10 * 16)
    reference = (2 * 1536 * 6 + 4 * 2 * 16 * 80 + 2 * 256 * 5) / 1e3 + 2 * 6 * made / 1e2
    assert cost_model.reference_seconds(SMALL, PLAIN, load) == pytest.approx(reference)
    gemms, attention = 2 * 1536 * 10, 4 * 2 * 16 * 100
    update = (3 * gemms + 3.5 * attention + 6 * 256 * 5) / 1e3 + 5 * 10 * made / 1e2
    assert cost_model.update_seconds(SMALL, PLAIN, load) == pytest.approx(update)
    again = (gemms + attention) / 1e3 + 2 * 10 * made / 1e2
    assert cost_model.update_seconds(SMALL, PLAIN, load, True) == pytest.approx(update + again)
    assert cost_model.adamw_seconds(SMALL, PLAIN, gpus=4) == pytest.approx(32 * SMALL.parameters / 4 / 1e2)
    # launches: a layer's once in a forward, twice in a backward, for each microbatch
    slow = dataclasses.replace(PLAIN, layer_seconds=7.0)
    split = dataclasses.replace(load, microbatches=3)
    assert cost_model.update_seconds(SMALL, slow, split) == pytest.approx(update + 3 * 3 * 2 * 7)
    assert cost_model.reference_seconds(SMALL, slow, split) == pytest.approx(reference + 3 * 2 * 7)


def test_decoding_by_hand():
    """Bound by bytes with one row, by FLOPs with many; over two GPUs half of both, and two small messages a layer."""
    weights = 1536 + 256
    few = cost_model.decode_seconds(SMALL, PLAIN, np.array([1]), np.array([3]))
    assert few == pytest.approx((2 * weights + 3 * 64) / 1e2)
    many = cost_model.decode_seconds(SMALL, PLAIN, np.array([1000]), np.array([3]))
    assert many == pytest.approx((2 * weights * 1000 + 4 * 2 * 16 * 3) / 1e3)
    assert cost_model.decode_seconds(SMALL, PLAIN, np.array([1]), np.array([3]), tp=2) == pytest.approx(
        few / 2 + 4 * 0.25
    )
    busy = dataclasses.replace(PLAIN, decode_seconds=1.0, row_seconds=0.1, decode_layer_seconds=0.01)
    two = cost_model.decode_seconds(SMALL, busy, np.array([1, 1]), np.array([3, 3]))
    assert two == pytest.approx(2 * (few + 1 + 0.1 + 0.02))


def test_tokens_are_counted_as_in_real_microbatches():
    """Counted by the benchmark on its microbatches: unique tokens, pairs, trained tokens of every point."""
    points = cost_check.document("scaling")["points"]
    assert len(points) == 18
    for point in points:
        load = cost_check.point_work(point["shape"])
        assert (load.unique, load.pairs, load.trained) == (
            point["unique_tokens"], point["pairs"], point["trained_tokens"]
        )  # fmt: skip


def test_shared_tokens_are_computed_once_a_microbatch():
    once = cost_model.work(4, 2, 30, 10, [21], 5)
    assert once.unique == 10 + 4 * 20 + 8 * 20 and once.prompts == 10 + 4 * 20 and once.microbatches == 1
    assert once.reference == once.unique - 10 and once.reference_pairs == once.pairs - 55
    split = cost_model.work(4, 2, 30, 10, [21], 5, microbatch_tokens=90)  # 240 behind the shared ten, 80 at a time
    assert split.microbatches == 3 and split.unique == once.unique + 2 * 10 and split.reference == once.reference


def test_the_longest_of_several_episodes():
    half = Lengths(np.array([10.0, 20.0]), np.array([10.0, 20.0]))
    assert half.longest(1) == pytest.approx(15)
    assert half.longest(3) == pytest.approx(20 - 10 / 8)
    assert half.live(np.array([0, 9, 10, 19, 20])).tolist() == [1, 1, 0.5, 0.5, 0]
    lengths, limit = cost_check.measured_lengths()
    drawn = np.random.default_rng(0).choice(lengths.sampled, (4000, 8)).max(1).mean()
    assert lengths.longest(8) == pytest.approx(drawn, rel=0.01)
    assert lengths.completion.max() == limit


def test_links_by_hand():
    """10 bytes/s out of a GPU, 1 out of a NIC, half a second a step of the ring."""
    seconds = cost_job.collective_seconds
    assert seconds(PLAIN, 100, 1) == 0
    assert seconds(PLAIN, 100, 4) == pytest.approx(100 * 3 / 4 / 10 + 3 * 0.5)
    assert seconds(PLAIN, 100, 16, messages=2) == pytest.approx(100 * 15 / 16 / 10 + 2 * 15 * 0.5)
    narrow = dataclasses.replace(PLAIN, nic=0.5)  # eight of them a node, which lacks half of it
    assert seconds(narrow, 100, 16) == pytest.approx(100 / 2 / (8 * 0.5) + 15 * 0.5)
    # in a node three gathers of four bytes a weight and a microbatch: twice weights, once gradients
    quiet = dataclasses.replace(PLAIN, hop_seconds=0.0)
    sent = SMALL.parameters * 7 / 8 / 10
    assert cost_job.fsdp_seconds(SMALL, quiet, 8, 3, lean=False) == pytest.approx(3 * 12 * sent)
    assert cost_job.fsdp_seconds(SMALL, quiet, 8, 3, lean=True) == pytest.approx(3 * 8 * sent)
    assert cost_job.fsdp_seconds(SMALL, PLAIN, 1, 3, lean=False) == 0


def job(gpus: int = 8, **changes) -> cost_job.Job:
    return cost_report.make_job("1.7B", gpus, **changes)


def test_memory_by_hand():
    one, many = cost_job.memory(job(1)), cost_job.memory(job(8), tp=2)
    parameters = SHAPES["1.7B"].parameters
    assert (one.state, one.reference, one.whole) == (16 * parameters, 4 * parameters, 0)
    assert one.copies == 2 * parameters and one.sampler == 2 * parameters + 2 * GIB
    assert one.kv_cache == 64 * (600 + 768) * 2 * 28 * 1024 * 2
    assert one.rollout == pytest.approx(22 * parameters + 2 * GIB + one.kv_cache)
    assert one.activations == 8192 * SHAPES["1.7B"].size.activation_bytes_per_token(False)
    assert one.update == pytest.approx(22 * parameters + one.activations + GIB)
    assert (many.state, many.whole, many.sampler) == (2 * parameters, 4 * parameters, parameters + 2 * GIB)
    assert many.rollout == many.state + many.reference + many.whole + many.sampler + many.kv_cache
    assert cost_job.memory(job(8, lean=True)).whole == 0
    assert cost_job.memory(job(8, reference=False)).reference == 0


def test_a_plan_fits_and_no_other_width_samples_faster():
    for model in ("1.7B", "8B", "32B"):
        for gpus in (1, 8, 64):
            each = cost_report.weak(model, gpus)
            chosen, usable = cost_job.plan(each), 0.94 * each.machine.memory
            if chosen is None:
                tight = dataclasses.replace(each, lean=True)
                widths = cost_job.widths(each)
                assert all(cost_job.memory(tight, tp).rollout > usable for tp in widths) or (
                    cost_job.memory(tight, 1, True).update > usable
                )
                continue
            tp, again = chosen
            assert cost_job.memory(each, tp).rollout <= usable and cost_job.memory(each, tp, again).update <= usable
            assert again == (cost_job.memory(each, tp, False).update > usable)
            fitting = [w for w in cost_job.widths(each) if cost_job.memory(each, w).rollout <= usable]
            assert cost_job.rollout_seconds(each, tp) == min(cost_job.rollout_seconds(each, w) for w in fitting)


def test_a_step_grows_with_what_it_has_to_do():
    base = cost_job.step(job())
    for changes in (dict(groups=16), dict(members=16), dict(limit=1536), dict(prompt=1200, shared=500)):
        more = cost_job.step(job(**changes))
        assert more.rollout > base.rollout and more.reference > base.reference and more.update > base.update, changes
    without = cost_job.step(job(reference=False))
    assert without.reference == 0 and without.update == base.update
    full = Lengths(np.array([768.0]), np.array([768.0]))
    assert cost_job.step(dataclasses.replace(job(), lengths=full)).rollout > base.rollout


def test_each_rate_moves_its_phases_and_no_other():
    each = job(64)
    base, names = cost_job.step(each), ("rollout", "sync", "reference", "update", "links")

    def faster(**rates) -> set[str]:
        machine = dataclasses.replace(each.machine, **{k: getattr(each.machine, k) * v for k, v in rates.items()})
        found = cost_job.step(dataclasses.replace(each, machine=machine))
        assert all(getattr(found, name) <= getattr(base, name) + 1e-12 for name in names)
        return {name for name in names if getattr(found, name) < getattr(base, name) * (1 - 1e-9)}

    assert faster(bandwidth=2) == {"rollout", "sync", "reference", "update"}
    assert {"reference", "update"} <= faster(flops=2) <= {"rollout", "reference", "update"}
    assert faster(nvlink=2, nic=2) == {"sync", "links"}
    assert faster(decode_seconds=0.5) == {"rollout"}


def test_whole_weights_are_waited_for_and_layers_only_beyond_the_work():
    each, shape = job(8), SHAPES["1.7B"]
    found, count = cost_job.step(each), each.work.microbatches
    gather = cost_job.gather_seconds(shape, each.machine, 8, lean=False)
    assert found.waiting == pytest.approx(gather)
    assert found.links == pytest.approx(gather + cost_job.fsdp_seconds(shape, each.machine, 8, count, lean=False))
    lean = cost_job.step(job(8, lean=True))
    assert lean.waiting == 0 < lean.links < found.links
    slow = dataclasses.replace(each.machine, nvlink=each.machine.nvlink / 1000)
    late = cost_job.step(dataclasses.replace(job(8, lean=True), machine=slow))
    optimizer = cost_model.adamw_seconds(shape, slow, 8)
    assert late.waiting == pytest.approx(late.links - late.reference - (late.update - optimizer))


def test_strong_scaling_ends_where_each_rank_has_one_group():
    found = [cost_job.step(cost_report.strong("1.7B", gpus)) for gpus in (64, 128, 256, 512, 1024)]
    assert all(a.seconds > b.seconds for a, b in zip(found[:4], found[1:4]))
    assert found[4].seconds >= found[3].seconds and found[4].sampled == found[3].sampled
    uneven = cost_job.spread(job(100), 512)
    assert uneven.groups == 6 and uneven.episodes == 512 * 8  # the fullest rank's, and all


def test_episodes_that_wait_for_a_slot_take_their_turn():
    """Lengths all equal: 64 slots play 128 episodes in two waves."""
    one = dataclasses.replace(job(1, groups=8), lengths=EVEN)
    two = dataclasses.replace(one, groups=16)
    forwards = [cost_job.rollout_seconds(each) for each in (one, two)]
    free = dataclasses.replace(one.machine, flops=1e30, bandwidth=1e30, row_seconds=0.0, layer_seconds=0.0)
    counted = [
        cost_job.rollout_seconds(dataclasses.replace(each, machine=free)) / free.decode_seconds for each in (one, two)
    ]
    quiet = dataclasses.replace(two, gpus=2, machine=dataclasses.replace(free, reduce_seconds=0.0))
    assert cost_job.rollout_seconds(quiet, tp=2) == pytest.approx(80 * free.decode_seconds)  # twice of both
    assert counted == pytest.approx([40, 80]) and forwards[1] > 1.9 * forwards[0]


def test_side_by_side_is_as_long_as_the_longer_side():
    each = job(16)
    servers, seconds = cost_job.overlapped(each)
    assert servers == 8
    training = cost_job.step(cost_job.spread(dataclasses.replace(each, gpus=8), 16 * 8))
    sampling = cost_job.serving(cost_job.spread(dataclasses.replace(each, gpus=8), 16 * 8))
    assert seconds == pytest.approx(max(sampling, training.seconds - training.rollout))


@pytest.fixture(scope="module")
def machine() -> Machine:
    return cost_check.calibrated()


def test_the_calibration_gives_back_its_four_figures(machine):
    points = {(p["sweep"], p["value"]): p for p in cost_check.document("scaling")["points"] if not p["control"]}
    for key in (cost_check.LAYER_POINT, cost_check.ROW_POINT):
        measured = cost_check.measured_rollout(points[key])
        assert cost_check.point_rollout(points[key], machine) == pytest.approx(measured, rel=1e-3)
    measured = cost_check.document("engines")["cases"][1]["engines"]["torch"]["seconds"]
    assert cost_check.case_rollout("c", machine) == pytest.approx(measured, rel=1e-3)
    assert machine.flops == pytest.approx(3 * 2 * 1024 * 1024 * 151936 / 5.38881, rel=1e-4)


FACTORS = {"rollout": 2.0, "whole step": 1.05, "peak memory": 1.05}  # 1.35 for reference, update and head


def test_predictions_of_what_was_not_fitted(machine):
    found = cost_check.comparisons(machine)
    assert len(found) == 14 + 18 + 16
    for c in found:
        factor = FACTORS.get(c.phase, 1.35)
        assert 1 / factor <= c.ratio <= factor, c
    training = [c.ratio for c in found if c.phase in ("reference and update", "update", "three GEMMs and rows")]
    assert 0.82 < min(training) and max(training) < 1.03  # as the page says


def test_the_page_has_the_tables_of_the_script(machine, tmp_path, monkeypatch, capsys):
    copy = tmp_path / "scaling.md"
    copy.write_text(re.sub(r"(:begin -->\n).*?(<!-- )", r"\1\2", PAGE, flags=re.DOTALL))
    assert copy.read_text() != PAGE
    monkeypatch.setattr(cost_report, "PAGE", copy)
    cost_report.main(["--write"])
    assert copy.read_text() == PAGE, "run: python benchmarks/cost_report.py --write"
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["measured"] is False and len(document["steps"]) == 40


def test_what_the_page_says_between_its_tables(machine):
    text = " ".join(PAGE.split())
    assert cost_check.describe(machine) == (
        "177 GFLOP/s, 12.3 GB/s, 0.25 ms a layer and forward, 0.13 ms an episode and forward"
    )
    for figure in ("177 GFLOP/s", "12.3 GB/s", "0.25 ms a layer", "0.13 ms an episode"):
        assert figure in text
    ratio = {(c.what[:6], c.phase): c.ratio for c in cost_check.comparisons(machine) if c.what.startswith("case")}
    assert "The reference of case c comes out 24 % too low, that of case a 26 % too high" in text
    assert (round(ratio["case c", "reference"], 2), round(ratio["case a", "reference"], 2)) == (0.76, 1.26)
    seconds = {(model, gpus): cost_job.step(cost_report.strong(model, gpus)).seconds
               for model in ("1.7B", "70B") for gpus in (64, 512)}  # fmt: skip
    gains = [f"{seconds[model, 64] / seconds[model, 512]:.1f}" for model in ("1.7B", "70B")]
    assert f"make the 1.7B step {gains[0]} times faster, the 70B step {gains[1]} times" in text
    large = cost_job.step(cost_report.weak("8B", 512))
    assert f"is busy {large.links:.1f} s of an 8B step of {large.seconds:.1f} s" in text
    lengths, _ = cost_check.measured_lengths()
    assert lengths.longest(64) / lengths.longest(4096) == pytest.approx(0.9, abs=0.01)
    assert len(lengths.sampled) == 1536
    fits = {model: cost_job.plan(cost_report.make_job(model, 512)) is not None for model in ("8B", "14B")}
    assert fits == {"8B": True, "14B": False} and "between 8B and 14B" in text
    for model in cost_report.MODELS:
        step = cost_job.step(cost_report.weak(model, 64))
        assert (step.rollout > step.seconds / 2) == (model in ("1.7B", "4B", "8B"))
        assert (step.update > step.seconds / 2) == (model in ("32B", "70B"))
        assert step.waiting < 0.02 * step.seconds
    fewer = cost_job.step(cost_report.weak("8B", 8))
    assert f"8B on 8 GPUs, which computes activations again: {100 * fewer.rollout / fewer.seconds:.0f} %" in text


def test_the_page_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert len(targets) >= 10
    for target in targets:
        assert (cost_report.PAGE.parent / target).is_file(), target


def test_published_steps_are_compared_as_published():
    assert 60 * 78.2 / 300 == pytest.approx(15.64)
    for recipe, whole, low, high in (("clarify-run4", False, 5, 7), ("clarify-run4", True, 2.5, 3.5),
                                     ("clarify-run1", False, 5, 7), ("clarify-run1", True, 2.5, 3.5)):  # fmt: skip
        published = 60 * cost_report.PUBLISHED_MINUTES[recipe] / cost_report.PUBLISHED_STEPS
        assert low < published / cost_report.anchor(recipe, whole).seconds < high
    rows = [[cell.strip() for cell in row.split("|")] for row in cost_report.table_anchor().splitlines()[2:]]
    assert [(row[1], row[-3]) for row in rows] == [("clarify-run4", "15.6")] * 2 + [("clarify-run1", "10.0")] * 2
    assert cost_report.anchor("clarify-run1").reference == 0 < cost_report.anchor("clarify-run4").reference


@pytest.mark.parametrize(
    "args, said",
    [
        (("--model", "9B"), "--model 9B"),
        (("--model", "8B", "--gpus", "1"), "1 x h100 are too few"),
        (("--model", "8B", "--gpus", "12"), "--gpus 12"),
        (("--model", "8B", "--groups", "0"), "--groups 0"),
        (("--model", "8B", "--shared", "600"), "--shared 600"),
        (("--model", "8B", "--write"), "--write"),
        (("--json", "/nowhere/file.json"), "--json"),
    ],
)
def test_refused_in_one_line(args, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        cost_report.main(list(args))
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and said in line


def test_one_step_of_a_model_folder(capsys):
    cost_report.main(["--model", str(ROOT / "grpo/tiny"), "--gpus", "1", "--machine", "a100"])
    out = capsys.readouterr().out
    step = json.loads(out.splitlines()[-1])["step"]
    assert "predicted" in out and step["seconds"] == pytest.approx(
        sum(step[name] for name in ("rollout", "sync", "reference", "update", "waiting"))
    )
    assert MACHINES["a100"].memory == 79 * GIB


def test_episodes_smoke(capsys):
    episodes.main(["--smoke"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(document["turns"]) == document["batch"] == 24
    assert all(s <= c <= document["limit"] for s, c in zip(document["sampled_tokens"], document["completion_tokens"]))
