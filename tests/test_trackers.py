"""Trackers get what the log has, once, under a run that stays the same; and a run does not notice how they fare."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from grpo import run_folder, trackers
from grpo.config import Config
from grpo.metrics import completion_paths, without_times
from grpo.trackers import TRACKERS, Entry, evaluation_numbers, require_installed, tracking
from tests.test_run import train_py

REPORT = {
    "avg_score": 0.4, "max_score": 0.9, "completion_rate": 0.5, "format_pass_rate": 0.5, "hallucination_rate": None,
    "mean_questions": 2.0, "families": {"coding": {"mean": 0.4}, "medical_intake": {"mean": None}},
    "greedy": {"avg_score": 0.6},
}  # fmt: skip
STEPS = 5


def rows(upto=STEPS):
    return [{"step": i, "reward": i / 10, "completions/mean_length": 20.0 + i, "kl": None} for i in range(1, upto + 1)]


def make_folder(path, names, upto=STEPS):
    """The folder of a run whose processes are played below: settings, episodes of all steps, a log of `upto` ones."""
    settings = Config().with_values({"report_to": tuple(names), "num_steps": STEPS})
    path.mkdir()
    run_folder.create(path, settings, "0" * 64, {})
    (path / "completions").mkdir()
    for step in range(1, STEPS + 1):
        conversation = [{"role": "user", "content": f"Plan {step}."}, {"role": "assistant", "content": "Which day?"}]
        episode = {"step": step, "group": 0, "reward": None, "hidden_profile": {"day": "friday"}}
        markdown, programs = completion_paths(path / "completions", step)
        programs.write_text(json.dumps(episode | {"conversation": conversation}) + "\n")
        markdown.write_text(f"# Step {step}\n\n    Which day?\n")
    (path / "log_history.json").write_text(json.dumps(rows(upto)))
    return settings


def process(settings, folder, done=0, upto=STEPS):
    """What one process of a run sends: all of `grpo.run.train`'s calls, in its order."""
    with tracking(settings, folder, done) as found:
        found.evaluation("before", REPORT)
        found.catch_up()
        for row in rows(upto)[done:]:
            found.step(row)
        if upto == STEPS:
            found.evaluation("after", REPORT)


class Recorder:
    """A tracker that keeps what it gets; `fails` names the method that raises `error`."""

    def __init__(self, fails=None, error=RuntimeError, first=0):
        self.fails, self.error, self.first = fails, error, first
        self.entries: list[Entry] = []
        self.exit_code = None

    def _maybe(self, method):
        if method == self.fails:
            raise self.error("no\nroute to host")

    def open(self, run):
        self.run = run
        self._maybe("open")
        return self.first

    def log(self, entry):
        self._maybe("log")
        self.entries.append(entry)

    def close(self, exit_code):
        self._maybe("close")
        self.exit_code = exit_code


@pytest.fixture
def recorder(monkeypatch):
    """Stands for wandb, wherever it is opened."""
    found = Recorder()
    monkeypatch.setitem(TRACKERS, "wandb", lambda: found)
    monkeypatch.setattr(trackers, "require_installed", lambda names: None)
    return found


# ----------------------------------------------------------------------------------------------------- any tracker


def test_positions_numbers_and_episodes(recorder, tmp_path):
    settings = make_folder(tmp_path / "run", ["wandb"])
    process(settings, tmp_path / "run")
    assert [entry.position for entry in recorder.entries] == [0, 1, 2, 3, 4, 5, 6]
    before, first = recorder.entries[:2]
    assert before.numbers == evaluation_numbers(REPORT)
    assert before.numbers == {
        "eval/avg_score": 0.4, "eval/max_score": 0.9, "eval/completion_rate": 0.5, "eval/format_pass_rate": 0.5,
        "eval/mean_questions": 2.0, "eval/coding": 0.4, "eval/greedy/avg_score": 0.6,
    }  # fmt: skip
    assert first.numbers == {"reward": 0.1, "completions/mean_length": 21.0}  # null is left out
    assert first.key == "completions/step_00001" and first.episodes()[0]["hidden_profile"] == {"day": "friday"}
    assert len({entry.key for entry in recorder.entries}) == 7 and before.episodes() == []
    assert recorder.exit_code == 0


def test_what_is_there_is_not_sent_again_and_what_is_missing_is(recorder, tmp_path):
    settings = make_folder(tmp_path / "run", ["wandb"], upto=4)
    recorder.first = 2  # killed before steps 2 to 4 had arrived; the checkpoint is that of step 3
    process(settings, tmp_path / "run", done=3)
    assert [entry.position for entry in recorder.entries] == [2, 3, 4, 5, 6]


def test_the_run_s_name_does_not_depend_on_where_its_folder_is(recorder, tmp_path):
    settings = make_folder(tmp_path / "run", ["wandb"])
    process(settings, tmp_path / "run", upto=2)
    before = (recorder.run.name, recorder.run.run_id)
    (tmp_path / "run").rename(tmp_path / "moved")
    process(settings, tmp_path / "moved", done=2)
    run_id = json.loads((tmp_path / "moved" / "config.json").read_text())["run_id"]
    assert (recorder.run.name, recorder.run.run_id) == before == (f"tiny-beta0-seed0-{run_id[:8]}", run_id)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("fails", ["open", "log", "close"])
def test_a_failure_is_one_line_and_the_rest_goes_on(recorder, monkeypatch, tmp_path, capsys, fails, error):
    other = Recorder()
    monkeypatch.setitem(TRACKERS, "trackio", lambda: other)
    recorder.fails, recorder.error = fails, error
    settings = make_folder(tmp_path / "run", ["wandb", "trackio"])
    process(settings, tmp_path / "run")
    said = capsys.readouterr().err
    assert said.startswith("warning: --report-to wandb: ") and said.count("\n") == 1
    assert "the run goes on without it" in said
    assert len(other.entries) == 7 and other.exit_code == 0


def test_a_tracker_that_hangs_is_not_waited_for(recorder, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.2)
    release, ended = threading.Event(), threading.Event()

    def hangs(entry):
        release.wait(30)
        ended.set()
        raise ConnectionError("abandoned")

    recorder.log = hangs
    settings = make_folder(tmp_path / "run", ["wandb"])
    start = time.monotonic()
    process(settings, tmp_path / "run")
    assert time.monotonic() - start < 5
    release.set()
    assert ended.wait(30)
    time.sleep(0.05)  # what comes of it then is said no more
    assert capsys.readouterr().err == "warning: --report-to wandb: not done after 0.2 s, left behind\n"


@pytest.mark.parametrize(("error", "code"), [(SystemExit(130), 130), (SystemExit("no"), 1), (RuntimeError("no"), 1)])
def test_how_the_run_ended_is_told(recorder, tmp_path, error, code):
    settings = make_folder(tmp_path / "run", ["wandb"])
    with pytest.raises(type(error)), tracking(settings, tmp_path / "run", 0):
        raise error
    assert recorder.exit_code == code


# ------------------------------------------------------------------------------------------------------- a whole run

RUN = """--model tiny --recipe tiny --device cpu --beta 0 --num-steps 2 --prompts-per-step 1 --num-generations 2
    --max-completion-len 32 --eval-limit 1""".split()


@pytest.mark.parametrize("fails", [None, "log"])
def test_a_run_sends_its_log_and_does_not_depend_on_its_tracker(recorder, monkeypatch, tmp_path, capsys, fails):
    monkeypatch.setattr("grpo.run.require_installed", lambda names: None)
    monkeypatch.setattr("grpo.run.plots.plot_run", lambda *args: None)
    recorder.fails = fails
    assert train_py([*RUN, "--output-dir", str(tmp_path / "run"), "--report-to", "wandb"]) == 0
    log = json.loads((tmp_path / "run" / "log_history.json").read_text())
    assert [row["step"] for row in without_times(log)] == [1, 2]
    if fails:
        assert recorder.entries == []
        assert capsys.readouterr().err.count("warning: --report-to wandb") == 1
        return
    assert [entry.position for entry in recorder.entries] == [0, 1, 2, 3]
    for row, entry in zip(log, recorder.entries[1:3], strict=True):
        assert {"step": entry.position} | entry.numbers == {k: v for k, v in row.items() if v is not None}
        assert len(entry.episodes()) == 2 and entry.episodes()[0]["conversation"][0]["role"] == "user"


def test_a_resumed_run_may_leave_its_trackers(recorder, monkeypatch, tmp_path):
    monkeypatch.setattr("grpo.run.require_installed", lambda names: None)
    monkeypatch.setattr("grpo.run.plots.plot_run", lambda *args: None)
    flags = [*RUN, "--eval-limit", "0", "--output-dir", str(tmp_path / "run")]
    assert train_py([*flags, "--report-to", "wandb"]) == 0
    count = len(recorder.entries)
    assert train_py(["--resume", str(tmp_path / "run"), "--report-to", "none"]) == 0
    assert len(recorder.entries) == count == 2


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_named_with_its_command_and_nothing_is_written(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    assert train_py([*RUN, "--output-dir", str(tmp_path / "run"), "--report-to", name]) == 2
    error = capsys.readouterr().err
    assert error == f'error: --report-to {name}: needs {name}: pip install -e ".[{name}]"\n'
    assert list(tmp_path.iterdir()) == []


def test_a_folder_called_wandb_is_no_package(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", importlib.machinery.PathFinder.find_spec)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "wandb").mkdir()
    assert importlib.util.find_spec("wandb") is not None
    with pytest.raises(ValueError, match="needs wandb"):
        require_installed(["wandb"])


# ---------------------------------------------------------------------------------------------------- the real packages


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Nobody is logged in, and nothing is found outside the test's folder."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_PROJECT", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    return tmp_path


def wandb_history(folder):
    """The rows of every file that wandb wrote, by step, and the ids and exit codes in them."""
    pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found, ids, codes = [], set(), []
    for path in sorted(folder.glob("wandb/*run-*/*.wandb")):
        for record in wandb_records(path, pb2):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = record.history.item
                found.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
            elif kind == "run":
                ids.add((record.run.run_id, record.run.display_name))
            elif kind == "exit":
                codes.append(record.exit.exit_code)
    return found, ids, codes


def wandb_records(path, pb2):
    data, at, record = path.read_bytes(), 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record, at = record + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            yield pb2.Record.FromString(record)
            record = b""


def next_second():
    """wandb names a run's folders by the second."""
    time.sleep(1.0 - time.time() % 1.0)


@pytest.mark.parametrize("lost", [False, True], ids=["closed", "killed"])
def test_wandb_continues_a_run_offline(offline, lost):
    """`lost`: what a killed process had not written is sent by the next one."""
    wandb = pytest.importorskip("wandb", reason='wandb is not installed (pip install -e ".[wandb]")')
    folder = offline / "run"
    settings = make_folder(folder, ["wandb"])
    process(settings, folder, upto=3)
    wandb.teardown()  # as the end of a process does: waits until everything is written
    if lost:
        (path,) = folder.glob("wandb/offline-run-*/*.wandb")
        path.write_bytes(path.read_bytes()[:7])
    next_second()
    process(settings, folder, done=2)
    wandb.teardown()
    found, ids, codes = wandb_history(folder)
    run_id = run_folder.stored(folder)["run_id"]
    assert ids == {(run_id, f"tiny-beta0-seed0-{run_id[:8]}")} and set(codes) == {0}
    assert [row["_step"] for row in found] == [row["step"] for row in found] == [0, 1, 2, 3, 4, 5, 6]
    assert [row.get("reward") for row in found] == [None, 0.1, 0.2, 0.3, 0.4, 0.5, None]
    assert [row.get("eval/avg_score") for row in found] == [0.4, *[None] * 5, 0.4]
    tables = sorted(folder.glob("wandb/*run-*/files/media/table/completions/*.json"))
    steps = Counter(path.name[: len("step_00001")] for path in tables)
    again = 3 if lost else 0  # the files of the killed process are still there
    assert steps == {f"step_{i:05d}": 1 + (i <= again) for i in range(1, STEPS + 1)}
    table = json.loads(tables[0].read_text())
    row = dict(zip(table["columns"], table["data"][0]))
    assert row["conversation"] == "user: Plan 1.\n\nassistant: Which day?" and row["hidden_profile"] == (
        '{"day": "friday"}'
    )


def test_wandb_without_network_or_with_a_bad_key_costs_one_line(offline, monkeypatch, capsys):
    pytest.importorskip("wandb", reason='wandb is not installed (pip install -e ".[wandb]")')
    monkeypatch.setenv("WANDB_API_KEY", "short")
    settings = make_folder(offline / "run", ["wandb"])
    process(settings, offline / "run")
    assert "warning: --report-to wandb: WANDB_API_KEY invalid" in capsys.readouterr().err


def test_trackio_continues_a_run(offline, monkeypatch):
    pytest.importorskip("trackio", reason='trackio is not installed (pip install -e ".[trackio]")')
    from trackio import sqlite_storage, utils

    for module in (sqlite_storage, utils):
        monkeypatch.setattr(module, "TRACKIO_DIR", offline / "trackio")
    folder = offline / "run"
    settings = make_folder(folder, ["trackio"])
    process(settings, folder, upto=3)
    process(settings, folder, done=2)
    storage = sqlite_storage.SQLiteStorage
    (record,) = storage.get_run_records(trackers.PROJECT)
    assert record["name"] == f"tiny-beta0-seed0-{run_folder.stored(folder)['run_id'][:8]}"
    logs = storage.get_logs(trackers.PROJECT, record["name"])
    assert [row["step"] for row in logs] == [0, 1, 2, 3, 4, 5, 6]
    assert [row.get("reward") for row in logs] == [None, 0.1, 0.2, 0.3, 0.4, 0.5, None]
    traces = storage.get_traces(trackers.PROJECT, record["name"])
    assert sorted(trace["step"] for trace in traces) == [1, 2, 3, 4, 5]
    assert len({trace["key"] for trace in traces}) == 5
    assert {trace["messages"][1]["content"] for trace in traces} == {"Which day?"}


def test_tensorboard_continues_a_run(offline):
    pytest.importorskip("tensorboard", reason='tensorboard is not installed (pip install -e ".[tensorboard]")')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = offline / "run"
    settings = make_folder(folder, ["tensorboard"])
    process(settings, folder, upto=4)
    next_second()  # it reads its files in the order of the seconds in their names
    process(settings, folder, done=2)
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    assert [(event.step, round(event.value, 3)) for event in events.Scalars("reward")] == [
        (1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5)
    ]  # fmt: skip
    assert [event.step for event in events.Scalars("eval/avg_score")] == [0, 6]
    texts = {f"completions/step_{i:05d}/text_summary" for i in range(1, STEPS + 1)}
    assert set(events.Tags()["tensors"]) == texts | {"config/text_summary"}
    (text,) = events.Tensors("completions/step_00003/text_summary")
    assert b"# Step 3" in text.tensor_proto.string_val[0]


def test_every_tracker_has_an_extra():
    setup = (Path(__file__).parent.parent / "setup.py").read_text()
    assert all(f'"{name}": ["{name}>=' in setup for name in TRACKERS)
