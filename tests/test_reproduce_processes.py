"""The processes of `python -m grpo.reproduce`: side by side, in order, and what becomes of those that fail."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grpo.reproduce import plan
from grpo.reproduce.processes import Chain, Stage, carry_out, left_of
from grpo.signals import Signals


def chain(tmp_path, name: str, *codes: str) -> Chain:
    return Chain(name, [Stage(f"stage {i}", ["-c", code], 1) for i, code in enumerate(codes)], tmp_path / f"{name}.log")


def carried_out(chains, jobs=2, threads=0):
    seen = []
    with Signals() as signals, signals.finish_first():
        carry_out(chains, jobs, threads, signals, lambda done, total: seen.append((done, total)))
    return seen


def test_a_failing_process_is_named_and_the_others_go_on(tmp_path, capsys):
    bad = chain(tmp_path, "bad", "import sys; print('on the way'); sys.exit('error: no room')", "open('never', 'w')")
    good = chain(tmp_path, "good", "print(1)", f"open({str(tmp_path / 'done')!r}, 'w')")
    seen = carried_out([bad, good], jobs=1)
    assert bad.failed == f"stage 0 failed with code 1: error: no room ({tmp_path / 'bad.log'})" and not good.failed
    assert (tmp_path / "done").exists() and good.stages == [] and len(bad.stages) == 2
    assert seen[-1] == (4, 4) and [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert "bad: stage 0 failed" in capsys.readouterr().out


def test_a_process_that_was_killed_is_named(tmp_path):
    killed = chain(tmp_path, "killed", "import os; print('step 3', flush=True); os.kill(os.getpid(), 9)")
    carried_out([killed])
    assert killed.failed == f"stage 0 was killed by signal 9, its last line: step 3 ({killed.log})"


def test_processes_run_side_by_side_with_the_threads_asked_for(tmp_path):
    met = "import os, pathlib, time, sys\n" + (
        "here, other = map(pathlib.Path, {!r})\nhere.write_text(os.environ['OMP_NUM_THREADS'])\n"
        "end = time.time() + 60\nwhile not other.exists():\n  time.sleep(0.01)\n  assert time.time() < end"
    )
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    chains = [chain(tmp_path, "x", met.format([a, b])), chain(tmp_path, "y", met.format([b, a]))]
    carried_out(chains, jobs=2, threads=7)
    assert not any(c.failed for c in chains) and Path(a).read_text() == "7"


def test_progress_counts_the_steps_of_a_running_training(tmp_path):
    history = tmp_path / "log_history.json"
    stage = Stage("training", [], units=8, history=history, start=2)
    c = Chain("run", [stage, Stage("evaluation", [], 3)], tmp_path / "log")
    assert left_of([c]) == 11
    for rows, left in ((5, 8), (2, 11), (1, 11), (10, 3)):  # a resumed run may fall behind where it was
        history.write_text("[" + ",".join('\n{"step": 1}' for _ in range(rows)) + "\n]\n")
        assert left_of([c]) == left
    c.failed = "yes"
    assert left_of([c]) == 0


PATIENT = """
import pathlib, signal, sys, time
here = pathlib.Path({!r})
def stop(*args):
    time.sleep(0.2)
    here.with_suffix(".saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, {})
here.touch()
time.sleep(60)
"""


def wait_for(path: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)


def signal_when(path: Path, then=lambda: None) -> None:
    """SIGTERM to this process as soon as `path` is there."""

    def wait():
        wait_for(path)
        os.kill(os.getpid(), signal.SIGTERM)
        then()

    threading.Thread(target=wait, daemon=True).start()


def test_a_signal_lets_processes_finish_and_starts_no_others(tmp_path):
    first = chain(tmp_path, "first", PATIENT.format(str(tmp_path / "first"), "stop"), "print(1)")
    second = chain(tmp_path, "second", "print(1)")
    signal_when(tmp_path / "first")
    carried_out([first, second], jobs=1)
    assert (tmp_path / "first.saved").exists() and not second.log.exists()
    assert not first.failed and len(first.stages) == 2  # stopped is not failed


def test_a_second_signal_leaves_no_process_behind(tmp_path):
    deaf = chain(tmp_path, "deaf", PATIENT.format(str(tmp_path / "deaf"), "signal.SIG_IGN"))

    def again():
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    signal_when(tmp_path / "deaf", again)
    with pytest.raises(SystemExit) as stop:
        carried_out([deaf])
    assert stop.value.code == 143 and deaf.process.returncode == -signal.SIGKILL


RUNNER = """
from pathlib import Path
from grpo.reproduce.processes import Chain, Stage, carry_out
from grpo.signals import Signals
chain = Chain("x", [Stage("x", ["-c", {!r}], 1)], Path({!r}))
carry_out([chain], 1, 0, Signals(), lambda done, total: None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_processes_end_with_the_one_that_started_them(tmp_path):
    runner = RUNNER.format(PATIENT.format(str(tmp_path / "child"), "stop"), str(tmp_path / "log"))
    process = subprocess.Popen([sys.executable, "-c", runner], cwd=plan.ROOT)
    wait_for(tmp_path / "child")
    process.kill()
    process.wait()
    wait_for(tmp_path / "child.saved")


def test_a_log_that_cannot_be_written_fails_its_chain_alone(tmp_path):
    bad, good = chain(tmp_path / "nowhere", "bad", "print(1)"), chain(tmp_path, "good", "print(1)")
    carried_out([bad, good])
    assert bad.failed.startswith("stage 0 cannot start: ") and "bad.log" in bad.failed and good.stages == []
