"""The text of a run's model card, section by section; `grpo.card` puts them together and publishes them.

Nothing here depends on the clock or on where a folder is: a resumed run ends with the same text as one that was never
stopped.
"""

from __future__ import annotations

import json
import math
import pprint
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open

from env.families import FAMILIES
from env.prompts import SYSTEM, TOOLS, brief
from grpo import compare, run_folder
from grpo.config import HELD_OUT_SIZE, RECIPES, Config, UsageError
from grpo.metrics import mean, read_log
from scenarios.generator import held_out

DATASET = "clarify-grpo/held-out"
LICENCES = {name: "apache-2.0" for name in ("tiny", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B")}
"""Of the bases whose licence is known here; the card of any other leaves it to the person who publishes."""
OPTIMIZERS = {"adamw": "AdamW", "adamw8bit": "AdamW with moments in 8 bits"}
PRIVATE = ("output_dir", "resume", "report_to", "env_url", "vllm_url", "save_every", "keep_checkpoints")
"""Knobs that say where things are, and change no result: not in a card."""
RATES = {
    "completion_rate": "plan submitted",
    "format_pass_rate": "format check passed",
    "hallucination_rate": "plan fields never told",
    "mean_questions": "questions per episode",
    "mean_revealing_questions": "questions that revealed something",
    "truncation_rate": "cut by a length limit",
    "greedy": "mean score, greedy",
}


@dataclass(frozen=True)
class Run:
    """What a card is made from: files of a finished run."""

    folder: Path
    repo: str = ""
    """Its name on the Hub, where it is published."""
    dataset: str = DATASET

    @cached_property
    def document(self) -> dict[str, Any]:
        """`config.json`."""
        return run_folder.stored(self.folder)

    @cached_property
    def settings(self) -> Config:
        """The run's settings."""
        return run_folder.stored_config(self.folder)

    @cached_property
    def reports(self) -> list[dict[str, Any]]:
        """The evaluations before and after training, or [] without both."""
        paths = [self.folder / name for name in ("eval_before.json", "eval_after.json")]
        return [compare.load_report(path) for path in paths] if all(path.exists() for path in paths) else []

    @property
    def base_on_hub(self) -> str | None:
        """The base's id on the Hub; None for a folder (by the rules of `grpo.model.source_of`) and for `tiny`."""
        name = self.settings.model.model
        local = name.startswith((".", "/", "~")) or Path(name).is_dir() or Path(name).parent.is_dir()
        return name if name.count("/") == 1 and not local else None

    @property
    def base(self) -> str:
        """What to call the base: never a path."""
        return self.base_on_hub or compare.names_of([{"model": self.settings.model.model}])[0]

    @property
    def name(self) -> str:
        """What to call the trained model."""
        settings = self.settings
        own = f"{Path(self.base).name}-beta{settings.loss.beta:g}-seed{settings.run.seed}"
        return self.repo.split("/")[-1] or own

    @property
    def source(self) -> dict[str, str]:
        """Where the full evaluation can be read, once it is published."""
        url = f"https://huggingface.co/{self.repo}/blob/main/eval_after.json"
        return {"source_name": "Evaluation report", "source_url": url} if self.repo else {}


def introduction(run: Run) -> str:
    """What the model is."""
    base = f"[{run.base}](https://huggingface.co/{run.base})" if run.base_on_hub else f"`{run.base}`"
    rank, size = run.settings.model.lora_rank, num_parameters(run.folder / "final") / 1e6
    lines = [
        f"# {run.name}",
        "",
        f"{base} ({size:.2f}M parameters), trained with GRPO to ask before it acts: it gets a vague request, may ask "
        "the user clarifying questions, one tool call per turn, and then submits one plan that holds what it was told.",
    ]
    if rank:
        text = f"Adapters of rank {rank} were trained (LoRA). They are merged into the weights here, and stand alone in"
        lines += ["", f"{text} `adapter/`, for peft."]
    return "\n".join(lines)


def results_section(run: Run) -> str:
    """Base and trained model side by side, with intervals, and what they allow to say."""
    if not run.reports:
        return "## Results\n\nThere is no evaluation before and after training."
    before, after = run.reports
    comparison = compare.compare(run.reports, names=["base", "trained"])
    rows = ["| family | n | base | trained | change |", "|---|---|---|---|---|"]
    for row in comparison["rows"]:
        if row["n"]:
            base, trained = row["models"]
            cells = [_estimate(base["mean"], base["interval"]), _estimate(trained["mean"], trained["interval"]),
                     _estimate(trained["delta"], trained["delta_interval"], "+.3f")]  # fmt: skip
            name = "**all**" if row["family"] == "all" else row["family"]
            rows.append(f"| {name} | {row['n']} | " + " | ".join(cells) + " |")
    rates = ["| over all episodes | base | trained |", "|---|---|---|"]
    for key, label in RATES.items():
        rates.append(f"| {label} | {_value(before, key)} | {_value(after, key)} |")
    interval = comparison["rows"][-1]["models"][1]["delta_interval"]
    if interval is None:
        verdict = "Too few scenarios for an interval: nothing can be said about the change."
    elif interval[0] == interval[1]:
        verdict = "Every scenario changed by the same amount, so the interval has no width and says nothing."
    elif interval[0] <= 0 <= interval[1]:
        verdict = (
            "**The interval of the change holds 0: this evaluation does not show that training changed the score.**"
        )
    else:
        verdict = "The interval of the change lies on one side of 0."
    sampling = f"temperature {after['temperature']:g}, the same random numbers for base and trained model"
    return "\n".join(
        [
            "## Results",
            "",
            f"Mean score ({after['rubric']} rubric, 0 to 1) on {after['n']} held-out scenarios, {sampling}; an episode "
            "without a plan scores 0. In brackets 95 % intervals: bootstrap over scenarios, those that share a user "
            "profile drawn together; of the change, paired by scenario. They say nothing about other training seeds.",
            "", *rows, "", verdict, "", *rates,
        ]
    )  # fmt: skip


def _value(report: Mapping[str, Any], key: str) -> str:
    if key == "greedy":
        return _estimate((report.get("greedy") or {}).get("avg_score"), None)
    value = report[key]
    if value is None:
        return "-"
    if key.startswith("mean"):
        return f"{value:.2f}"
    interval = report["completion_interval"] if key == "completion_rate" else None
    return f"{value:.0%}" + (f" [{interval[0]:.0%}, {interval[1]:.0%}]" if interval else "")


def _estimate(value: float | None, interval: Sequence[float] | None, form: str = ".3f") -> str:
    text = "-" if value is None else format(value, form)
    return text + (f" [{interval[0]:{form}}, {interval[1]:{form}}]" if interval else "")


SNIPPET = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = "{model}"{comment}
SYSTEM = {system}
TOOLS = {tools}
REQUEST = {request}

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL)
messages = [{{"role": "system", "content": SYSTEM}}, {{"role": "user", "content": REQUEST}}]
inputs = tokenizer.apply_chat_template(
    messages, tools=TOOLS, add_generation_prompt=True, enable_thinking=False, return_dict=True, return_tensors="pt"
)
output = model.generate(**inputs, max_new_tokens=128, do_sample=False)
reply = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
print(reply)
"""


def snippet(run: Run) -> str:
    """One turn with transformers alone, from the prompt that the model was trained on."""
    pretty = pprint.pformat(TOOLS, width=100, sort_dicts=False)
    return SNIPPET.format(
        model=run.repo or ".",
        comment="" if run.repo else "  # this folder, or the model's name on the Hub",
        system=_literal(SYSTEM, ". "),
        tools=pretty,
        request=_literal(brief(held_out(1)[0]), "\n"),
    )


def _literal(text: str, at: str) -> str:
    """A long string as Python has it, broken behind every `at`."""
    parts = [part + at for part in text.split(at)]
    parts[-1] = parts[-1][: -len(at)]
    return "(\n" + "".join(f"    {json.dumps(part)}\n" for part in parts if part) + ")"


def usage_section(run: Run) -> str:
    """A snippet that runs, and what comes after it."""
    return "\n".join(
        [
            "## How to use it",
            "",
            "One turn, in transformers:",
            "", "```python", snippet(run).rstrip(), "```", "",
            "The reply is a tool call. Append it as an assistant message and the user's answer as a message in the "
            "role `tool`, and ask for the next turn, until the call is `propose_plan`. The rules of the game, the "
            "simulated user and the rubrics are in the repository of the project (clarify-grpo): "
            "`python eval.py --model FOLDER` plays its held-out scenarios.",
        ]
    )  # fmt: skip


def training_section(run: Run) -> str:
    """How to repeat the run, and what it was."""
    rows, settings = read_log(run.folder / "log_history.json"), run.settings
    versions, machine = run.document.get("versions", {}), run.document.get("machine", {})
    loss, rollout = settings.loss, settings.rollout
    anchor = f"{loss.beta:g}, {loss.kl_estimator} in the {loss.kl_in}" if loss.beta else "0: no reference"
    facts = {
        "recipe": f"`{settings.run.recipe}`",
        "loss": f"`{loss.loss_type}`, beta {anchor}",
        "steps": f"{len(rows)} of {rollout.prompts_per_step} scenarios x {rollout.num_generations} episodes, up to "
        f"{rollout.max_completion_len} tokens each",
        "learning rate": f"{settings.optim.learning_rate:g}, {settings.optim.lr_schedule}, "
        + OPTIMIZERS[settings.optim.optimizer],
        "seed": str(settings.run.seed),
    }
    if rows:
        last = rows[-20:]
        facts["tokens"] = f"{rows[-1]['num_tokens']:,} in all episodes, prompts included"
        facts[f"reward, last {len(last)} steps"] = _mean_of(last, "reward")
        if loss.beta:
            facts[f"KL to the base, last {len(last)} steps"] = _mean_of(last, "kl", ".4f") + " nats per token"
        skipped = sum(bool(row.get("skipped_updates")) for row in rows)
        if skipped:
            facts["steps with a dropped update"] = str(skipped)
    names = [name for name in versions if name not in ("platform", "python")]
    facts["versions"] = ", ".join([f"Python {versions.get('python', '?')}", *(f"{n} {versions[n]}" for n in names)])
    facts["machine"] = ", ".join(f"{key} {value}" for key, value in machine.items())
    table = [f"| {name} | {value} |" for name, value in facts.items()]
    return "\n".join(["## Training", "", "```", command(run), "```", "", "| | |", "|---|---|", *table])


def _mean_of(rows: Sequence[Mapping[str, Any]], key: str, form: str = ".3f") -> str:
    return _estimate(mean(row[key] for row in rows if row.get(key) is not None), None, form)


def command(run: Run) -> str:
    """The flags that repeat the run: its recipe, and what differs from it."""
    recipe = run.settings.run.recipe
    usual = Config().with_values(RECIPES.get(recipe, {})).flat()
    words = ["python", "train.py", "--recipe", recipe]
    for name, value in run.settings.flat().items():
        flag = name.replace("_", "-")
        if name in (*PRIVATE, "recipe") or value == usual[name]:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, tuple) else (run.base if name == "model" else value,)
            words += [f"--{flag}", *map(str, values)]
    return shlex.join(words)


def limits_section(run: Run) -> str:
    """What these numbers do not say."""
    n = run.reports[1]["n"] if run.reports else 0
    lines = [
        f"- The scenarios are generated from templates in {len(FAMILIES)} families, in English, and the user is "
        "simulated by rules. How it does with people is not measured.",
        "- It was trained on the score that is reported. The rubric checks fields and their values; it does not judge "
        "whether a plan is a good one.",
        "- One run with one seed. Other seeds give other numbers.",
        "- It is for this game: other tools, prompts and tasks were neither trained nor tested. `medical_intake` is "
        "about collecting answers; nothing here gives medical advice.",
    ]  # fmt: skip
    if 0 < n < HELD_OUT_SIZE:
        lines.append(
            f"- {n} of the {HELD_OUT_SIZE} held-out scenarios were played; the intervals show how little that is."
        )
    if run.settings.model.model == "tiny":
        lines.append("- The base is a very small policy made for this game alone: it knows no language beyond it.")
    if run.settings.model.model not in LICENCES:
        lines.append("- The weights derive from the base, whose licence applies; this card states none.")
    return "\n".join(["## Limits", "", *lines])


def num_parameters(folder: Path) -> int:
    """Parameters in a model folder's safetensors files, tied ones once. Raises UsageError where they cannot be read."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():
                    total += math.prod(file.get_slice(name).get_shape())
        except Exception as error:  # safetensors' own, or the disk's
            raise UsageError(f"{path}: damaged ({error})") from error
    return total
