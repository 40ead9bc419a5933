"""What several processes raise together ends them together: told once, and not before the first has cleaned up."""

# ruff: noqa: F811 (fixtures are imported, and arguments bear their names)

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from grpo import distributed, shards
from grpo.config import RunStopped, UsageError
from grpo.console import run_entry
from grpo.guard import Guard
from grpo.shared_errors import sendable, shared, teller, told
from grpo.trackers import Trackers
from tests import processes
from tests.test_distributed import at_step, flags, models, rewards_with_spread, start  # noqa: F401

ROOT = Path(__file__).parent.parent


def test_who_tells_is_known_by_what_came_of_an_error_too():
    assert teller(ValueError()) is None
    first, own = shared(ValueError()), ValueError("own")
    assert teller(first) == 0
    assert told(ValueError("copy"), 1, None).args == ("copy",) and told(ValueError("copy"), 1, own) is own
    assert teller(own) == 1
    for make in (lambda: RunStopped("a"), lambda: SystemExit(3)):
        with pytest.raises((RunStopped, SystemExit)) as caught:
            try:
                raise own
            except ValueError as error:
                raise make() from error
        assert teller(caught.value) == 1
    assert teller(shared(own)) == 0  # the last word counts


def test_an_exception_that_cannot_be_sent_is_sent_as_its_text():
    class Local(Exception):
        pass

    value, error = sendable(3, Local("of here alone"))
    assert value == 3 and type(error) is RuntimeError and "of here alone" in str(error)
    assert type(sendable(None, UsageError("x"))[1]) is UsageError


def refuse(rank, error):
    if distributed.rank() == rank:
        raise error


def raise_shared(error):
    raise shared(error)


def write_nowhere():
    model = torch.nn.Linear(2, 2)
    try:
        shards.write(Path("/dev/null/folder"), model, torch.optim.AdamW(model.parameters()))
    except OSError as error:
        raise RunStopped("the disk is full") from error


ALL = {
    "of a checkpoint in parts": (write_nowhere, 1),
    "raised by each": (lambda: raise_shared(RunStopped("the disk is full")), 1),
    "of the first": (lambda: distributed.first(refuse, 0, UsageError("the disk is full")), 2),
    "of the second": (lambda: distributed.agreed(refuse, 1, RunStopped("the disk is full")), 1),
    "an exit": (lambda: raise_shared(SystemExit(143)), 143),
}


@pytest.mark.parametrize("name", ALL)
def test_none_ends_before_the_first_has_cleaned_up(tmp_path, name):
    """torchrun kills what is left as soon as one process has ended."""
    action, code = ALL[name]
    done = tmp_path / "uploaded"

    def work():
        try:
            with distributed.session():
                try:
                    action()
                finally:
                    if distributed.is_first():
                        time.sleep(1)
                        done.touch()
        except BaseException as error:
            print("still there" if done.exists() else "too early")
            if isinstance(error, (RunStopped, UsageError)):
                print(error)
            raise SystemExit(code if isinstance(error, (RunStopped, UsageError)) else error.code) from None

    ended = processes.run(2, tmp_path / "said", work)
    assert ended.codes == [code, code], ended.output
    assert all("still there" in output for output in ended.output)
    assert "".join(ended.output).count("the disk is full") == (name != "an exit")
    assert name != "of the second" or "the disk is full" in ended.output[1]


def test_the_first_process_may_fail_alone_when_the_others_have_reached_the_end(tmp_path):
    """At its plots and its model card, say."""

    def work():
        with distributed.session():
            if distributed.is_first():
                time.sleep(1)
                raise RunStopped("the disk is full")

    ended = processes.run(2, tmp_path / "said", lambda: run_entry(work), limit=60)
    assert ended.codes == [1, 1] and ended.output == ["error: the disk is full\n", ""]


@pytest.mark.parametrize("end", ["stopped", "signal"])
def test_a_run_that_stops_by_itself_has_closed_its_trackers_before_any_process_ends(models, tmp_path, end):
    done, close = tmp_path / "uploaded", Trackers.close

    def slow(self, exit_code):
        time.sleep(2)
        close(self, exit_code)
        done.write_text(str(exit_code))

    def work():
        Trackers.close = slow
        if end == "stopped":
            Guard.after = lambda self, rows, groups: RunStopped("that was enough")
        words = flags(models[True], tmp_path / "run", eval_limit=0, num_steps=2)
        try:
            at_step(1, 1, partial(signal.raise_signal, signal.SIGTERM) if end == "signal" else int)(*words)
        finally:
            print("still there" if done.exists() else "too early")

    ended = processes.run(2, tmp_path / "said", work)
    code = 1 if end == "stopped" else 143
    assert ended.codes == [code, code] and done.read_text() == str(code), ended.output
    assert all("still there" in output for output in ended.output), ended.output
    assert "".join(ended.output).count("that was enough") == (end == "stopped")


SCRIPT = """
import sys, time
from pathlib import Path
from grpo import distributed, shards
from grpo.config import RunStopped
from grpo.shared_errors import shared
with distributed.session():
    try:
        raise shared(RunStopped("that was enough"))
    finally:
        if distributed.is_first():
            time.sleep(3)
            Path(sys.argv[1]).touch()
"""


def test_torchrun_lets_the_first_process_clean_up(tmp_path):
    (tmp_path / "work.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(tmp_path / "work.py"), str(tmp_path / "uploaded")]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=ROOT, env={"PYTHONPATH": str(ROOT), **os.environ}
    )
    assert ended.returncode != 0 and ended.stderr.count("RunStopped: that was enough") == 1, ended.stderr
    assert (tmp_path / "uploaded").exists()
