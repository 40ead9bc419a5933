"""Makes the tiny policy from nothing: tokenizer, model, three stages of training, measurements.

    python -m grpo.tiny.make [--out DIR] [--seed N] [--threads N]

The same seed on the same machine gives the same files.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from functools import partial
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from env.clarify import ClarifyEnv
from grpo.chat import ChatTokens
from grpo.tiny import demos
from grpo.tiny.lookup import start_with_lookup
from grpo.tiny.measure import measure
from grpo.tiny.pretrain import Stage, new_model, train
from grpo.tiny.tokenizer import build_tokenizer
from scenarios.generator import training_scenario
from scenarios.schema import Scenario

CONTEXT = 1024
SCENARIO_SEED = 1_000_000
"""Run seed of the demonstrations' scenarios: not one that a training run uses by default."""


def stages(vocabulary: demos.Vocabulary, scale: float = 1.0) -> list[Stage]:
    """The curriculum. `scale` shortens it (for a quick look)."""

    def scenario(rng: random.Random, invented: float) -> Scenario:
        drawn = training_scenario(SCENARIO_SEED, rng.randrange(10**9))
        return demos.with_invented_values(drawn, vocabulary, rng) if rng.random() < invented else drawn

    def episode(rng: random.Random, habits: demos.Habits, invented: float) -> demos.Example:
        return demos.Demonstrator(vocabulary, scenario(rng, invented), habits, rng).play()

    def recall(rng: random.Random, most: int, as_replies: bool) -> demos.Example:
        return demos.recall(vocabulary, rng, rng.randint(2, most), as_replies)

    def steps(number: int) -> int:
        return max(1, round(number * scale))

    return [
        Stage("recall, short", partial(recall, most=4, as_replies=False), steps(250), 48, 2e-3),
        Stage("recall, longer", partial(recall, most=7, as_replies=True), steps(250), 32, 2e-3),
        Stage("clean episodes", partial(episode, habits=demos.CLEAN, invented=0.6), steps(400), 16, 2e-3),
        Stage("imperfect episodes", partial(episode, habits=demos.IMPERFECT, invented=0.3), steps(600), 16, 1.5e-3),
    ]


def make(out: Path, seed: int, scale: float) -> None:
    """Writes the policy into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    demos.check_texts()
    started = time.monotonic()
    domain = demos.texts_of_the_domain()
    scenarios = [training_scenario(SCENARIO_SEED, index) for index in range(200)]
    prompts = [message["content"] for s in scenarios for message in ClarifyEnv(s).reset()]
    tokenizer = build_tokenizer([*domain * 20, *prompts], out, CONTEXT)
    vocabulary = demos.Vocabulary(ChatTokens(tokenizer))
    torch.manual_seed(seed)
    model = new_model(tokenizer, hidden=128, layers=4, heads=4, intermediate=256, context=CONTEXT)
    start_with_lookup(model, seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    seconds = {}
    for stage in stages(vocabulary, scale):
        seconds[stage.name] = train(
            model, stage, pad_id=tokenizer.pad_token_id, seed=seed, report=partial(print, flush=True)
        )
        save(model, tokenizer, out)
    figures = measure(model, tokenizer)
    seconds["everything, measuring included"] = time.monotonic() - started
    document = {"seed": seed, "seconds": {name: round(value) for name, value in seconds.items()}, **figures}
    (out / "measurements.json").write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document, indent=2))


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """bfloat16 weights, configuration and generation configuration; the tokenizer is there already."""
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    copy = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(state)
    copy.generation_config = model.generation_config
    copy.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write (default: here)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and demonstrations (default: 0)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--scale", type=float, default=1.0, help="length of every stage (default: 1; for a quick look)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    transformers_logging.disable_progress_bar()
    make(args.out, args.seed, args.scale)


if __name__ == "__main__":
    main()
