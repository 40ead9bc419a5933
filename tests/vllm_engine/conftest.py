"""Tests on vLLM's real engine. They are skipped where it is not installed: `make test-vllm` installs and runs them.

Starting vLLM takes seconds, so all tests share one engine on a copy of the bundled policy; whoever changes weights
gets them back afterwards.
"""

import copy
import json
import shutil

import pytest

from grpo.engines.choice import make_engine
from grpo.model import TINY_FOLDER, load_policy
from grpo.run import make_chat
from scenarios.generator import held_out
from tests.vllm_engine.helpers import SKIPPED, installed, settings_for


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason=SKIPPED)
    for item in items:
        if "tests/vllm_engine" in item.path.as_posix():
            item.add_marker(pytest.mark.vllm)
            if not installed():
                item.add_marker(skip)


@pytest.fixture(scope="session")
def settings(tmp_path_factory):
    """The bundled policy, with a generation config that would sample quite differently."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(TINY_FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.exists() else {}
    hostile = dict(do_sample=True, top_k=20, top_p=0.5, temperature=0.2, repetition_penalty=1.3, max_new_tokens=2)
    path.write_text(json.dumps(generation | hostile))
    return settings_for(folder)


@pytest.fixture(scope="session")
def shared(settings):
    policy = load_policy(settings.model)
    chat = make_chat(policy)
    return policy, chat, make_engine(settings, policy, chat, held_out(None))


@pytest.fixture
def chat(shared):
    return shared[1]


@pytest.fixture
def policy(shared):
    return shared[0]


@pytest.fixture
def engine(shared):
    """The shared engine on the bundled weights, with its own seed and limits."""
    policy, _, engine = shared
    weights = copy.deepcopy(policy.model.state_dict())
    attributes = {name: getattr(engine, name) for name in ("seed", "max_context", "plan", "eos_ids", "policy")}
    engine.start(0)
    yield engine
    policy.model.load_state_dict(weights)
    vars(engine).update(attributes)
    engine.weights_changed()
    engine.start(0)
