"""TRL's side of `step_vs_trl.py`: `GRPOTrainer.train()`, held before each optimiser step until it is asked for.

Argument: settings as JSON. Runs in the environment that has trl; of this repository it uses `env` and `scenarios`.

The multi-turn case is TRL's `environment_factory`. So that both sides play the same episodes, the whole text of a turn
goes to the environment, as on our side: TRL's parser of tool calls is replaced by one that calls the environment's only
method with it. By itself TRL would end an episode at the first turn without a call that it can read; the environment
says what was wrong and goes on.

TRL samples another turn after every call. An episode that is over therefore answers with more text than the token
budget has room for: TRL drops such a reply, samples no further turn, and the episode ends where ours does.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
import time
import zlib
from typing import Any

import torch
from cases import SCENARIO_SEED, Case, forced_rewards
from datasets import Dataset
from sides import Channel, peak_bytes, process_memory
from transformers import AutoTokenizer, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from env.clarify import ClarifyEnv
from env.prompts import TOOLS, first_messages
from env.rubrics import reward
from scenarios.generator import training_scenario

NO_PLAN_PENALTY = 0.1  # the trainer's default on our side
TURNS = 12  # no scenario allows more


class ClarifyTurns:
    """One episode at a time: TRL resets it with a row of the data set, and calls `play_turn` as if it were a tool."""

    over = "over " * 1024  # more tokens than any budget here: see the module's text

    def reset(self, index: int, **row: Any) -> None:
        self._env = ClarifyEnv(training_scenario(SCENARIO_SEED, index))
        self._env.reset()

    def play_turn(self, text: str) -> str:
        """Play one turn.

        Args:
            text: All of the turn.
        """
        result = self._env.step(text)
        return result.reply or self.over

    def get_reward(self) -> float:
        return reward(self._env.record, "card", NO_PLAN_PENALTY)


def turn_as_call(tokenizer: Any, ids: list[int], **options: Any) -> dict[str, Any]:
    """In place of TRL's `parse_response`. A turn that a limit cut off is not played, and ends its episode."""
    text = tokenizer.decode(ids[:-1], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if ids and ids[-1] == tokenizer.eos_token_id:
        call = {"name": "play_turn", "arguments": {"text": text}}
        message["tool_calls"] = [{"type": "function", "function": call}]
    return message


class Timed(GRPOTrainer):
    """GRPOTrainer with a clock around its stages; nothing else is changed."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.spent = {"scored": 0.0, "reference": 0.0}
        self.scoring = False
        self.sampled: tuple[list, list, list | None] = ([], [], None)

    def now(self) -> float:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _generate(self, prompts: list) -> Any:
        output = super()._generate(prompts)
        self.sampled = output[0], output[1], output[2]
        return output

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start, self.scoring = self.now(), True
        output = super()._generate_and_score_completions(inputs)
        self.spent["scored"] += self.now() - start
        self.scoring = False
        return output

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if not self.scoring:  # the policy's own, in the update
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        start = self.now()
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.spent["reference"] += self.now() - start
        return output


class OnRequest(TrainerCallback):
    """Waits for the parent before each optimiser step and reports after it."""

    def __init__(self, channel: Channel, group_size: int):
        self.channel, self.group_size, self.requests = channel, group_size, channel.requests()
        self.trainer: Timed | None = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if next(self.requests, "end") == "end":
            sys.exit(0)
        assert self.trainer
        self.trainer.spent = {"scored": 0.0, "reference": 0.0}
        self.start = self.trainer.now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        assert trainer
        seconds, spent = trainer.now() - self.start, trainer.spent
        prompts, completions, masks = trainer.sampled
        masks = masks or [[1] * len(ids) for ids in completions]
        turns = [sum(mask and not before for before, mask in zip([0, *row], row)) for row in masks]
        firsts = [list(map(int, ids)) for ids in prompts[:: self.group_size]]
        self.channel.send(
            {
                "seconds": seconds,
                "phases": {
                    "rollout": spent["scored"] - spent["reference"],
                    "reference": spent["reference"],
                    "update": seconds - spent["scored"],
                },
                "sampled_tokens": sum(map(sum, masks)),
                "completion_tokens": sum(map(len, completions)),
                "prompt_tokens": sum(map(len, prompts)),
                "prompts_crc": zlib.crc32(json.dumps(firsts).encode()),
                "turns": sum(turns) / len(turns),
                "reward": trainer._metrics["train"]["reward"][-1],
                "peak_bytes": peak_bytes(trainer.accelerator.device),
            }
        )


def arguments(case: Case, settings: dict[str, Any], folder: str) -> GRPOConfig:
    """TRL's settings: what our side computes, and TRL's defaults for the rest."""
    rows = settings["trl_batch"] or case.episodes
    return GRPOConfig(
        output_dir=folder,
        use_cpu=settings["device"] == "cpu",
        bf16=False,
        fp16=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=case.episodes // rows,
        num_generations=case.group_size,
        max_completion_length=case.completion,
        temperature=case.temperature,
        top_p=1.0,
        top_k=0,
        beta=case.beta,
        num_iterations=1,
        epsilon=0.2,
        loss_type="grpo",
        scale_rewards="group",
        learning_rate=case.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=settings["trl_checkpointing"],
        generation_kwargs={"eos_token_id": None} if case.forced else None,
        max_tool_calling_iterations=None if case.forced else TURNS,
        max_steps=settings["steps"],
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def make_trainer(case: Case, settings: dict[str, Any], folder: str, callback: OnRequest) -> Timed:
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    scenarios = [training_scenario(SCENARIO_SEED, index) for index in range(case.groups * settings["steps"])]
    rows = [{"prompt": first_messages(scenario), "index": index} for index, scenario in enumerate(scenarios)]
    options: dict[str, Any] = {}
    if case.forced:
        options["reward_funcs"] = lambda completions, **columns: forced_rewards(len(completions))
    else:
        tokenizer.response_template = {"fields": {}}  # set, so that TRL parses turns; it is not read
        grpo_trainer.parse_response = turn_as_call
        options["environment_factory"] = ClarifyTurns
    trainer = Timed(
        model=settings["model"],
        args=arguments(case, settings, folder),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[callback],
        **options,
    )
    if case.forced:
        trainer.eos_token_ids = [-1]  # a sampled end-of-turn id shall not end an episode here
    else:
        trainer._env_tools[None] = TOOLS  # what the prompt lists: the same as on our side
    callback.trainer = trainer
    return trainer


def main() -> None:
    channel = Channel()
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    transformers_logging.set_verbosity_error()
    case = Case(**settings["case"])
    callback = OnRequest(channel, case.group_size)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, settings, folder, callback)
        args = trainer.args
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "beta",
                 "num_iterations", "loss_type", "temperature", "max_completion_length", "generation_kwargs",
                 "max_tool_calling_iterations", "optim", "use_cpu", "bf16")  # fmt: skip
        channel.send(
            {
                "versions": {
                    package: importlib.metadata.version(package)
                    for package in ("torch", "trl", "transformers", "accelerate", "datasets")
                },
                "settings": {name: getattr(args, name) for name in names}
                | {"dtype": str(trainer.model.dtype).removeprefix("torch."),
                   "attention": trainer.model.config._attn_implementation},
                "resident_bytes": process_memory("self", "VmRSS"),
            }
        )  # fmt: skip
        trainer.train()


if __name__ == "__main__":
    main()
