"""How a card is divided between trainer and vLLM, on made-up cards."""

import dataclasses

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from grpo import run
from grpo.config import Config, UsageError
from grpo.engines.vllm_memory import GIB, USABLE, ModelSize, cpu_plan, gpu_plan, make_plan
from grpo.lean_modules import keep_less
from grpo.tree_attention import ATTENTION_NAME, Segment, TreeLayout
from tests import toy

# Published configurations: parameters (tied head once), layers, hidden, query, key and MLP widths.
QWEN3 = {
    "0.6B": ModelSize(596_049_920, 28, 1024, 2048, 1024, 3072),
    "1.7B": ModelSize(1_720_574_976, 28, 2048, 2048, 1024, 6144),
    "4B": ModelSize(4_022_468_096, 36, 2560, 4096, 1024, 9728),
}
# clarify-run4: 2 x 4 episodes of 768 tokens behind prompts of up to 630.
RUN4 = dict(max_context=1462, min_context=631, episodes=8, update_tokens=2 * 630 + 8 * 768, reference=True)


def plan(card, model, **options):
    size = QWEN3[model]
    return gpu_plan(card * GIB, size, torch.bfloat16, **RUN4 | {"trained": size.parameters} | options)


@pytest.mark.parametrize(
    ("card", "model", "options", "level"),
    [
        (24, "0.6B", dict(), 2),
        (24, "0.6B", dict(checkpointing=True), 0),
        (40, "1.7B", dict(checkpointing=True), 2),
        (40, "0.6B", dict(checkpointing=True), 0),
        (80, "0.6B", dict(), 0),
        (80, "1.7B", dict(checkpointing=True), 0),
        (80, "4B", dict(reference=False, checkpointing=True), 2),
        (141, "1.7B", dict(), 0),
        (125, "4B", dict(), 2),
        (141, "4B", dict(), 0),
        (125, "4B", dict(checkpointing=True), 0),
    ],
)
def test_sleep_level_by_memory(card, model, options, level):
    chosen = plan(card, model, **options)
    assert chosen.sleep_level == level and f"sleep level {level}" in chosen.describe()
    size, trainer = QWEN3[model], (20 if options.get("reference", True) else 16) * QWEN3[model].parameters
    share = chosen.gpu_memory * card * GIB
    # Whatever else: trainer and vLLM fit together during rollouts, and vLLM has its weights and one whole episode.
    assert trainer + share <= USABLE * card * GIB
    assert share >= 2 * size.parameters + chosen.max_context * size.kv_bytes_per_token(torch.bfloat16)
    assert chosen.max_context == RUN4["max_context"]


@pytest.mark.parametrize(("card", "model"), [(24, "1.7B"), (24, "4B"), (40, "4B"), (80, "4B")])
def test_what_cannot_fit_is_one_line_with_the_sizes(card, model):
    with pytest.raises(UsageError) as error:
        plan(card, model)
    assert f"a card of {card} GiB is too small" in str(error.value) and "\n" not in str(error.value)


def test_an_evaluation_needs_no_room_for_training():
    chosen = plan(24, "1.7B", reference=False, trained=0)
    assert chosen.sleep_level == 0
    with pytest.raises(UsageError):
        plan(24, "1.7B", reference=False)


def test_adapters_need_little_and_no_second_base():
    with pytest.raises(UsageError):
        plan(24, "1.7B")
    assert plan(24, "1.7B", trained=20_000_000, reference=False, checkpointing=True).sleep_level == 0


def test_without_a_reference_more_fits():
    with pytest.raises(UsageError):
        plan(35, "1.7B")
    assert plan(35, "1.7B", reference=False).max_context == RUN4["max_context"]


def test_the_context_shrinks_where_the_card_is_nearly_full():
    cards = [x / 100 for x in range(3700, 4600)]
    contexts = []
    for card in cards:
        try:
            contexts.append(plan(card, "1.7B", max_context=40_000).max_context)
        except UsageError:
            assert not contexts  # once it fits, it fits on every larger card
    assert contexts == sorted(contexts) and contexts[-1] == 40_000
    assert RUN4["min_context"] <= contexts[0] < 2000


def test_the_share_is_what_the_recipe_needs_and_not_the_whole_card():
    small, large = plan(141, "0.6B"), plan(141, "0.6B", episodes=64)
    token = QWEN3["0.6B"].kv_bytes_per_token(torch.bfloat16)
    assert (large.gpu_memory - small.gpu_memory) * 141 * GIB == pytest.approx(56 * 1462 * token, rel=0.02)
    assert small.gpu_memory < 0.05


def test_the_users_share_is_taken_or_refused():
    assert plan(80, "1.7B", gpu_memory=0.3).gpu_memory == 0.3
    assert (plan(80, "1.7B", gpu_memory=0.3).sleep_level, plan(80, "1.7B", gpu_memory=0.4).sleep_level) == (0, 2)
    with pytest.raises(UsageError, match="--gpu-memory 0.8"):
        plan(80, "1.7B", gpu_memory=0.8)
    with pytest.raises(UsageError, match="--gpu-memory 0.01"):
        plan(80, "1.7B", gpu_memory=0.01)


def test_an_update_that_may_not_fit_is_said():
    assert "--microbatch-tokens" in plan(44, "1.7B").describe()
    assert "--microbatch-tokens" not in plan(44, "1.7B", checkpointing=True).describe()


def kept(layers, tokens, dtype):
    """Bytes that a forward of a small Qwen3 keeps for its backward pass: of tokens, and copies of weights."""
    config = Qwen3Config(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, attn_implementation=ATTENTION_NAME,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    assert keep_less(model) == 5 * layers + 1
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}  # alive, so that no address comes twice

    def keep(tensor):
        if (where := tensor.untyped_storage().data_ptr()) not in weights:
            saved.setdefault(where, tensor)
        return tensor

    row = torch.arange(tokens)[None] % 50
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        model.model(input_ids=row, position_ids=row, use_cache=False, tree_layout=TreeLayout([Segment(tokens, -1)]))
    of_tokens, copies = 0, 0
    for tensor in saved.values():
        size = tensor.untyped_storage().nbytes()
        of_tokens, copies = (of_tokens + size, copies) if tokens in tensor.shape else (of_tokens, copies + size)
    return of_tokens, copies, config, sum(p.numel() for p in model.model.layers.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_what_autograd_keeps(dtype):
    (one, *_), (two, copies, config, parameters) = kept(1, 70, dtype), kept(2, 70, dtype)
    # Of each norm and of attention one float32 number: two a token, two a head of queries, one a head of keys.
    statistics = 4 * (2 + 2 * 6 + 2)
    size = ModelSize.of(config, parameters)
    assert (two - one) / 70 == size.activation_bytes_per_token(False, dtype) / 2 + statistics
    checkpointed = size.activation_bytes_per_token(True, dtype)
    assert checkpointed == size.activation_bytes_per_token(False, dtype) / 2 + 2 * 4 * 64
    # When the forward has ended; until then the cast weight of the MLP's last layer is there too.
    vectors, down = 2 * (2 * 64 + 2 * 16), 2 * 64 * 96
    there = 0 if dtype == torch.float32 else 2 * (parameters - vectors - down)
    assert copies == there <= size.copy_bytes(dtype) <= 2 * parameters


def test_an_update_needs_copies_of_the_weights():
    """Just enough for the update, and 1 % of the copies less."""
    size, needs = QWEN3["0.6B"], 20 * QWEN3["0.6B"].parameters
    needs += RUN4["update_tokens"] * size.activation_bytes_per_token(False) + 2 * size.parameters + GIB
    for spare, said in ((2**20, False), (-0.02 * size.parameters, True)):
        card = (needs + spare) / USABLE / GIB
        assert ("the update may not fit" in plan(card, "0.6B").describe()) == said
    assert "the update may not fit" not in plan(card, "0.6B", trained=0).describe()


def test_of_several_processes_whole_weights_are_there_before_the_update_or_behind_it():
    """They count against vLLM's share, and against the update only where they are more than it needs."""
    size = QWEN3["4B"]
    state = 20 * size.parameters // 8
    few, many = (plan(141, "4B", processes=8, update_tokens=tokens) for tokens in (1, 8192))
    update = 2 * size.parameters + 8192 * size.activation_bytes_per_token(False)
    assert update > 4 * size.parameters
    for chosen, most in ((few, 4 * size.parameters), (many, update)):
        together = state + most + chosen.gpu_memory * 141 * GIB
        assert f"need about {together / GIB:.0f} GiB of 141" in chosen.describe()


def test_on_a_cpu_the_cache_holds_every_episode():
    size = ModelSize.of(toy.make_model(toy.make_tokenizer()).config, 1)
    assert size.kv_bytes_per_token(torch.float32) == 2 * 2 * 2 * 8 * 4
    chosen = cpu_plan(size, torch.float32, 100, episodes=24)
    assert chosen.kv_cache_bytes == 25 * 128 * size.kv_bytes_per_token(torch.float32)
    assert "no sleep mode on a CPU" in chosen.describe() and chosen.sleep_level == 0
    big = cpu_plan(QWEN3["4B"], torch.float32, 4096, episodes=64)
    assert big.kv_cache_bytes == 4 * GIB
    assert cpu_plan(QWEN3["4B"], torch.float32, 32768, episodes=64).kv_cache_bytes > 8 * GIB  # two episodes, always


def test_a_runs_plan_comes_from_its_settings(folder, monkeypatch):
    settings = Config().with_values(dict(recipe="tiny", model=str(folder), device="cpu", prompts_per_step=2, beta=0.2))
    policy = run.load_policy(settings.model)
    assert make_plan(settings, policy, 500, 100).max_context == 500
    on_gpu = dataclasses.replace(policy, device=torch.device("cuda"), dtype=torch.bfloat16)
    properties = type("Properties", (), {"total_memory": 24 * GIB})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    small = make_plan(settings, on_gpu, 500, 100)
    assert small.sleep_level == 0 and 0 < small.gpu_memory < 0.2
    wanted = settings.with_values({"gpu_memory": 0.5})
    assert make_plan(wanted, on_gpu, 500, 100).gpu_memory == 0.5
