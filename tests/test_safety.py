"""No data becomes code: an audit of every module, and of what the interpreter does while hostile outputs are played."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROJECT = [
    path for part in ("env", "grpo", "scenarios", "kernels/grpo_kernels") for path in (ROOT / part).rglob("*.py")
]
PROJECT += [ROOT / "train.py", ROOT / "eval.py"]
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "ast", "code", "runpy", "pty"}


def dangers(tree: ast.AST):
    """(line, what) of everything in a module that could run data as code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.split(".")[0] in FORBIDDEN_MODULES:
                    yield node.lineno, f"import {name}"
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in FORBIDDEN_CALLS or name in ("os.system", "os.popen", "yaml.load", "importlib.import_module"):
            yield node.lineno, name
        if keywords.get("shell") == "True" or keywords.get("allow_pickle") == "True":
            yield node.lineno, f"{name}(shell or allow_pickle)"
        if name == "torch.load" and keywords.get("weights_only") != "True":
            yield node.lineno, "torch.load without weights_only=True"
        if keywords.get("trust_remote_code", "False") != "False":
            yield node.lineno, "trust_remote_code"
        if re.fullmatch(r"Auto(Config|Tokenizer|ModelForCausalLM)\.from_pretrained", name):
            if "trust_remote_code" not in keywords:  # left out, transformers asks at the terminal
                yield node.lineno, f"{name} without trust_remote_code=False"


def test_nothing_in_the_project_can_run_data_as_code():
    assert len(PROJECT) > 40
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in PROJECT
        for line, what in dangers(ast.parse(path.read_text()))
        # The dispatch of the kernels imports its own modules, by names in a table.
        if not (what == "importlib.import_module" and "grpo_kernels" in path.parts)
        # torchrun's processes are one program; torch's object collectives between them pickle, and an exception must
        # stand that.
        and not (what == "import pickle" and path.name == "shared_errors.py")
    ]
    assert not found


@pytest.mark.parametrize("code", [
    "import pickle", "from ast import literal_eval", "eval(x)", "exec(x)", "os.system(x)", "torch.load(f)",
    "torch.load(f, weights_only=False)", "subprocess.run(x, shell=True)", "np.load(f, allow_pickle=True)",
    "AutoTokenizer.from_pretrained(x)", "AutoConfig.from_pretrained(x, trust_remote_code=True)",
    "f(trust_remote_code=y)",
])  # fmt: skip
def test_the_audit_sees(code):
    assert list(dangers(ast.parse(code)))


AUDIT = """
import json
import sys
from env.clarify import ClarifyEnv
from env.rubrics import score
from scenarios.generator import generate

payloads, watching = json.loads(sys.argv[1]), False

def play():
    for payload in payloads:
        env = ClarifyEnv(generate(3))
        env.reset()
        calls = f"ask_question({payload!r})", f"propose_plan({payload})", f"propose_plan({{'date': {payload!r}}})"
        for text in (payload, *calls):
            if env.record.stop_reason is None:
                env.step(text)
        score(env.record)

play()  # imports and patterns are compiled now
seen = []
sys.addaudithook(lambda event, args: seen.append((event, str(args)[:200])) if watching else None)
watching = True
play()
watching = False
print(json.dumps(seen))
"""
PAYLOADS = (
    "__import__('os').system('touch /tmp/fuzz_marker')", "{{ ''.__class__ }}", "eval('1')", "os.system('x')",
    '{"__class__": "os.system", "args": ["x"]}', "!!python/object/apply:os.system ['x']", "cos\nsystem\n(S'x'\ntR.",
    "<tool_call>{\"name\": \"__import__\", \"arguments\": {\"name\": \"os\"}}</tool_call>", "f\"{__import__('os')}\"",
    "{'a': (lambda: 1)()}", "$(touch x)", "`touch x`", "../../../etc/passwd", "file:///etc/passwd",
)  # fmt: skip


def test_hostile_outputs_run_import_compile_and_open_nothing():
    """The interpreter's own audit events while hostile outputs are played: none at all."""
    done = subprocess.run(
        [sys.executable, "-c", AUDIT, json.dumps(PAYLOADS)], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    assert not Path("/tmp/fuzz_marker").exists()
