"""`--report-to wandb trackio tensorboard`: a run's log, its episodes and its evaluations, copied to trackers.

A tracker only watches. Each one has a thread of its own, which reads what the run has already written to its folder:
it may be slow, hang or fail, and training neither waits nor stops; after a failure one line says so and the run goes on
without that tracker. Whatever a tracker lacks when a run is resumed is sent again from the folder.

Positions order what is sent, the same in every tracker: 0 is the evaluation before training, n the line of step n in
`log_history.json` under the same names, num_steps + 1 the evaluation after it. A run's identity in a tracker comes from
the run's id, so a resumed run is the same run there, and a position that is there already is not sent twice.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from grpo import run_folder
from grpo.config import Config, UsageError
from grpo.metrics import completion_paths, dumps, read_log
from grpo.model import one_line
from grpo.resume import say

PROJECT = "clarify-grpo"
FINISH_SECONDS = 30.0
"""How long the end of a run waits for all trackers together."""

EVAL_KEYS = ("avg_score", "max_score", "completion_rate", "format_pass_rate", "hallucination_rate", "mean_questions")


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker needs to know of a run."""

    folder: Path
    run_id: str
    settings: Config
    done: int
    """Finished steps, of a resumed run."""

    @property
    def name(self) -> str:
        """The same wherever the folder is moved to."""
        values = self.settings.flat()
        model = Path(str(values["model"])).name
        return f"{model}-beta{values['beta']:g}-seed{values['seed']}-{self.run_id[:8]}"

    @property
    def config(self) -> dict[str, Any]:
        """Settings and versions."""
        return json.loads(dumps(self.settings.flat() | {"versions": run_folder.versions()}))


@dataclass(frozen=True)
class Entry:
    """One position: numbers by name, and where a step's episodes are, for people and for programs."""

    position: int
    numbers: dict[str, float]
    files: tuple[Path, Path] | None = None

    @property
    def key(self) -> str:
        """Of the episodes. Another one for each step: under a fixed key a tracker shows only the last table."""
        return f"completions/step_{self.position:05d}"

    def episodes(self) -> list[dict[str, Any]]:
        """The step's episodes, as `completions/*.jsonl` has them; [] where there are none."""
        if self.files is None or not self.files[1].exists():
            return []
        return [json.loads(line) for line in self.files[1].read_text(encoding="utf-8").splitlines()]


class Tracker(Protocol):
    """A tracker, used by one thread. Every method may raise whatever it likes."""

    def open(self, run: TrackedRun) -> int:
        """Begin or continue the run; the first position that is not there yet."""

    def log(self, entry: Entry) -> None:
        """Send one position; they come in order."""

    def close(self, exit_code: int) -> None:
        """No more is to come; 0: the run has ended well."""


class Wandb:
    """Weights & Biases. Without a key the run stays offline, in `RUN/wandb`, for `wandb sync`."""

    def open(self, run: TrackedRun) -> int:
        import wandb

        self.wandb = wandb
        chosen = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
        mode = None if chosen or wandb.login(prompt=False) else "offline"
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.run_id,
            name=run.name,
            resume="allow",
            config=run.config,
            dir=str(run.folder),
            mode=mode,
            # The terminal is the run's: no copy of it is made, nothing printed at the end.
            settings=wandb.Settings(console="off", quiet=True),
        )
        self.run.define_metric("*", step_metric="step")
        return last_offline_step(run.folder, run.run_id) + 1 if self.run.offline else self.run.starting_step

    def log(self, entry: Entry) -> None:
        numbers: dict[str, Any] = {"step": entry.position} | entry.numbers
        episodes = entry.episodes()
        if episodes:
            columns = [name for name in episodes[0] if name != "step"]
            rows = [[_cell(name, row.get(name)) for name in columns] for row in episodes]
            numbers[entry.key] = self.wandb.Table(columns=columns, data=rows)
        self.run.log(numbers, step=entry.position)

    def close(self, exit_code: int) -> None:
        self.run.finish(exit_code)


def last_offline_step(folder: Path, run_id: str) -> int:
    """The last step in the files that wandb has written for a run in `RUN/wandb`; -1 without any.

    wandb begins a new file when a run goes on, and does not look into the ones before. It writes late: where it was
    killed, its file ends before what it was given, or is damaged there, and counts as far as it can be read.

    The file is 7 bytes and then a log in LevelDB's format: blocks of 32 KiB with pieces (checksum, length, kind) that
    make up protobuf records.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    last = -1
    for path in folder.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb"):
        data, at, record = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:  # no room for another piece in this block
                at += 32768 - at % 32768
                continue
            length, kind = struct.unpack_from("<HB", data, at + 4)
            record, at = record + data[at + 7 : at + 7 + length], at + 7 + length
            if kind in (1, 4) and at <= len(data):  # a whole record, or its last piece
                try:
                    found, record = Record.FromString(record), b""
                except DecodeError:
                    break
                if found.WhichOneof("record_type") == "history":
                    last = max(last, found.history.step.num)
    return last


class Trackio:
    """trackio: a local database (`TRACKIO_DIR`), or what its environment variables name; `trackio show` reads it."""

    def open(self, run: TrackedRun) -> int:
        import trackio

        self.trackio = trackio
        # A run is found again by its name. No monitors: they are threads that take time from training.
        self.run = trackio.init(
            PROJECT, run.name, config=run.config, resume="allow", embed=False, auto_log_cpu=False, auto_log_gpu=False
        )
        return self.run._next_step  # behind the last one in its database; there is no public name for it

    def log(self, entry: Entry) -> None:
        numbers: dict[str, Any] = dict(entry.numbers)
        episodes = entry.episodes()
        if episodes:
            numbers[entry.key] = [self._trace(row) for row in episodes]
        self.run.log(numbers, step=entry.position)

    def _trace(self, row: Mapping[str, Any]) -> Any:
        metadata = {name: value for name, value in row.items() if name != "conversation"}
        return self.trackio.Trace(row["conversation"], metadata)

    def close(self, exit_code: int) -> None:
        self.run.finish()


class TensorBoard:
    """Event files in `RUN/tensorboard`. A resumed run's first event has TensorBoard drop the numbers from its step on,
    but not the texts: those that are there are not written again."""

    def open(self, run: TrackedRun) -> int:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        first = run.done + 1 if run.done and folder.exists() else 0
        events = (event for path in folder.glob("*tfevents*") for event in EventFileLoader(str(path)).Load())
        self.there = {value.tag.removesuffix("/text_summary") for event in events for value in event.summary.value}
        self.writer = SummaryWriter(str(folder), purge_step=first)
        if "config" not in self.there:
            self.writer.add_text("config", _code(json.dumps(run.config, indent=1)), 0)
        return first

    def log(self, entry: Entry) -> None:
        for name, value in entry.numbers.items():
            self.writer.add_scalar(name, value, entry.position)
        if entry.files is not None and entry.files[0].exists() and entry.key not in self.there:
            self.writer.add_text(entry.key, entry.files[0].read_text(encoding="utf-8"), entry.position)
        self.writer.flush()  # its own thread writes; a killed process should not lose two minutes

    def close(self, exit_code: int) -> None:
        self.writer.close()


TRACKERS: dict[str, type] = {"wandb": Wandb, "trackio": Trackio, "tensorboard": TensorBoard}


def _cell(name: str, value: Any) -> Any:
    """A table's cells are numbers and texts."""
    if name == "conversation":
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in value)
    return dumps(value) if isinstance(value, (dict, list)) else value


def _code(text: str) -> str:
    """As a block of code in Markdown."""
    return "\n".join("    " + line for line in text.split("\n"))


def require_installed(names: Sequence[str]) -> None:
    """Raises UsageError where the package of a tracker is missing."""
    for name in names:
        if name != "none" and not _installed(name):
            raise UsageError(f'--report-to {name}: needs {name}: pip install -e ".[{name}]"')


def _installed(name: str) -> bool:
    """A folder of that name (wandb leaves one where it runs) is no package."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # in sys.modules without a spec
        return False
    return spec is not None and spec.origin is not None


# ---------------------------------------------------------------------------------------------------------- their feed


class Feed:
    """A tracker in a thread of its own."""

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun):
        self.name, self.tracker, self.run = name, tracker, run
        self.entries: queue.SimpleQueue[Entry | int] = queue.SimpleQueue()
        self.failed = False
        # A daemon: one that hangs does not keep the process.
        self.thread = threading.Thread(target=self._work, name=f"report-to-{name}", daemon=True)
        self.thread.start()

    def put(self, item: Entry | int) -> None:
        """An entry, or the run's exit code as the last item. Returns at once."""
        if not self.failed:
            self.entries.put(item)

    def _work(self) -> None:
        try:
            first = self.tracker.open(self.run)
            while isinstance(item := self.entries.get(), Entry):
                if item.position >= first:
                    self.tracker.log(item)
            self.tracker.close(item)
        except BaseException as error:  # a service may raise anything, SystemExit too
            if not self.failed:
                self.fail(f"{one_line(error)}; the run goes on without it")

    def fail(self, reason: str) -> None:
        """Send no more, and say why, once."""
        self.failed = True
        say(f"warning: --report-to {self.name}: {reason}")


class Trackers:
    """The trackers of a run. No method waits for one of them, but `close`."""

    def __init__(self, run: TrackedRun, trackers: Mapping[str, Tracker]):
        self.run = run
        self.feeds = [Feed(name, tracker, run) for name, tracker in trackers.items()]

    def step(self, row: Mapping[str, Any]) -> None:
        """A line of the log whose episodes are written. What was not measured is left out."""
        numbers = {name: value for name, value in row.items() if value is not None and name != "step"}
        self._put(Entry(row["step"], numbers, completion_paths(self.run.folder / "completions", row["step"])))

    def evaluation(self, when: Literal["before", "after"], report: Mapping[str, Any] | None) -> None:
        """An evaluation, if there was one."""
        if report is not None:
            position = {"before": 0, "after": self.run.settings.optim.num_steps + 1}[when]
            self._put(Entry(position, evaluation_numbers(report)))

    def catch_up(self) -> None:
        """Offer the steps that were done before the run was resumed: a tracker may lack some."""
        for row in read_log(self.run.folder / "log_history.json") if self.feeds else []:
            if row["step"] <= self.run.done:
                self.step(row)

    def _put(self, item: Entry | int) -> None:
        for feed in self.feeds:
            feed.put(item)

    def close(self, exit_code: int) -> None:
        """Wait a while for what is still to be sent."""
        self._put(exit_code)
        deadline = time.monotonic() + FINISH_SECONDS
        for feed in self.feeds:
            feed.thread.join(max(0.0, deadline - time.monotonic()))
            if feed.thread.is_alive():
                feed.fail(f"not done after {FINISH_SECONDS:g} s, left behind")


def evaluation_numbers(report: Mapping[str, Any]) -> dict[str, float]:
    """What a tracker shows of an evaluation (`grpo.evaluate.report`)."""
    numbers = {f"eval/{key}": report.get(key) for key in EVAL_KEYS}
    numbers |= {f"eval/{family}": row["mean"] for family, row in report["families"].items()}
    if "greedy" in report:
        numbers["eval/greedy/avg_score"] = report["greedy"]["avg_score"]
    return {name: value for name, value in numbers.items() if value is not None}


@contextlib.contextmanager
def tracking(settings: Config, folder: Path, done: int) -> Iterator[Trackers]:
    """The run's trackers, from when its `config.json` is written until it ends.

    Args:
        done: finished steps, of a resumed run.
    """
    names = [name for name in settings.run.report_to if name != "none"]
    run = TrackedRun(folder, run_folder.stored(folder)["run_id"], settings, done)
    trackers = Trackers(run, {name: TRACKERS[name]() for name in names})
    exit_code = 0
    try:
        yield trackers
    except SystemExit as error:
        exit_code = error.code if isinstance(error.code, int) else 1
        raise
    except BaseException:
        exit_code = 1
        raise
    finally:
        trackers.close(exit_code)
