"""Sampler on vLLM, in the trainer's process and on its device: the only file that imports vLLM.

Tokens in, tokens out: a turn is one request, its prompt the ids of the conversation so far. Requests are added one by
one while others run, so every episode goes at its own pace, and vLLM's prefix cache keeps what earlier turns and other
members of the group have computed. Sampling settings are given with each request, so nothing that a model's
`generation_config.json` says has an effect. Seeds are per request, a hash of (seed, step, scenario, member, turn): a
rerun repeats, the members of a group differ.

vLLM has its own copy of the weights. It is made from the model's configuration alone, with arbitrary values; what it
samples with comes from the trainer, before the first turn and after each update, in this order:

    wake the weights' memory, load every tensor once, forget cached prefixes, wake the KV cache's memory, compare

Prefixes that were computed with older weights must never be read again, so they are forgotten after the last tensor
has arrived and before anything is generated. The comparison at the end (see `vllm_sync`) stops the run where vLLM's
log-probs of a fixed text, or its tensors, are not the trainer's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from grpo import distributed
from grpo.config import UsageError
from grpo.data_types import Episode
from grpo.engines import Key, TurnOutput, TurnRequest
from grpo.engines.vllm_memory import MemoryPlan
from grpo.engines.vllm_numba import hide_llvmlite
from grpo.engines.vllm_sync import CANARY_LENGTH, check_canary
from grpo.engines.vllm_tensors import named_weights, repack_heads
from grpo.model import Policy, one_line
from grpo.sampling import SamplingConfig, random_stream

TESTED = (0, 32)
INSTALL = 'pip install -e ".[vllm]"'
MIN_TEMPERATURE = 0.01  # vLLM silently raises lower ones to this
CPU_BLOCK = 32  # tokens of a KV block there: small ones share more of a prefix, the kernel wants multiples of 32

# Set before vLLM is imported. One process: the engine reads the trainer's tensors where they are.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
for _name, _value in {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
    os.environ.setdefault(_name, _value)
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # it reads the variable later than it speaks
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind
except Exception as _error:  # a build for another torch or CUDA fails with almost anything
    raise UsageError(f"--engine vllm: vLLM cannot be imported ({one_line(_error)}); {INSTALL}") from _error


class VllmEngine:
    """vLLM behind the rollout loop's protocol (see the module's text). Implements `grpo.engines.Engine`.

    One for the life of the process: closing it closes process groups that every vLLM here shares.

    Args:
        policy: whose weights to sample with. vLLM computes in `policy.dtype`, on `policy.device`.
        eos_ids: ids that end a turn.
        plan: how much memory vLLM may use, its context and its sleep level.
        slots: episodes that run at once; more than that wait in line.
        seed: run seed.
        sampling: temperature and top-p unless `start` says otherwise.
        canary: ids of a text on which both sides must agree; the first 128 are used. Default: arbitrary ids.
        tensor_parallel: how many of torchrun's processes form one engine, which plays the same in each of them.

    Raises:
        UsageError: a vLLM of another version or for another device, or one that cannot run this model here.
    """

    def __init__(
        self,
        policy: Policy,
        eos_ids: Collection[int],
        plan: MemoryPlan,
        slots: int = 64,
        seed: int = 0,
        sampling: SamplingConfig | None = None,
        canary: Sequence[int] = (),
        tensor_parallel: int = 1,
    ):
        self.tensor_parallel = tensor_parallel
        _check_installation(policy)
        self.policy, self.eos_ids, self.plan, self.max_context = policy, frozenset(eos_ids), plan, plan.max_context
        self.seed, self.default_sampling = seed, sampling or SamplingConfig()
        vocab = policy.model.config.get_text_config().vocab_size
        self.canary = tuple(canary or ((7 * i + 3) % vocab for i in range(CANARY_LENGTH)))
        self.canary = self.canary[: min(CANARY_LENGTH, self.max_context - 1)]  # one more is sampled
        self._stale, self._asleep = True, False  # what vLLM starts with are arbitrary numbers
        self._turns = 0
        self._running: dict[str, TurnRequest] = {}
        self._ids: dict[Key, tuple[int, ...]] = {}  # the conversation of each live episode
        self._folder = tempfile.TemporaryDirectory(prefix="grpo-vllm-")
        policy.model.config.save_pretrained(self._folder.name)
        hide_llvmlite()
        try:
            with _settings_kept():
                self.llm = vllm.LLM(self._folder.name, **self._options(slots))
        except Exception as error:
            raise UsageError(
                f"--engine vllm: cannot run {type(policy.model).__name__} here ({one_line(error)})"
            ) from error
        self._begin(0, None)

    def _options(self, slots: int) -> dict[str, Any]:
        on_cpu = self.policy.device.type == "cpu"
        options: dict[str, Any] = dict(
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            dtype=str(self.policy.dtype).removeprefix("torch."),
            max_model_len=self.max_context,
            max_num_seqs=slots,
            enable_sleep_mode=self.plan.sleep_level > 0,
            # On a CPU the first generation would spend seconds on compiling.
            enforce_eager=on_cpu,
        )
        if distributed.size() > 1:  # the workers are torchrun's processes, and no others are started
            options |= dict(distributed_executor_backend="external_launcher", tensor_parallel_size=self.tensor_parallel)
        if on_cpu:
            return options | dict(kv_cache_memory_bytes=self.plan.kv_cache_bytes, block_size=CPU_BLOCK)
        return options | dict(gpu_memory_utilization=self.plan.gpu_memory)

    @property
    def description(self) -> str:
        """For the run's header."""
        return f"vllm {vllm.__version__}, in process, contexts of {self.max_context} tokens, {self.plan.describe()}"

    # ------------------------------------------------------------------------------------------------------ weights

    def weights_changed(self) -> None:
        """The trainer's weights are no longer those that vLLM has."""
        self._stale = True

    def sleep(self) -> None:
        """Rollouts are over: give device memory back, as far as the plan says. Level 2 drops weights and KV cache."""
        if self.plan.sleep_level and not self._asleep:
            self._abort()
            self.llm.sleep(level=self.plan.sleep_level)
            self._asleep = True
            self._stale |= self.plan.sleep_level >= 2

    def wake(self) -> None:
        """Ready to sample with the trainer's present weights; does nothing where that is so already.

        Raises:
            RunStopped: vLLM's log-probs or tensors are not the trainer's afterwards.
        """
        if not (self._stale or self._asleep):
            return
        self._abort()
        if self._asleep:
            self.llm.wake_up(tags=["weights"])
        if self._stale:
            weights = named_weights(self.policy.model)
            self.llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": weights, "is_checkpoint_format": True}
            )
            self.llm.apply_model(repack_heads)
            self.forget_prefixes()
        if self._asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        if self._stale:
            ids, logprobs = self._canary_logprobs()
            parts = self.tensor_parallel > 1  # of every tensor: log-probs alone are compared then
            self.llm.apply_model(lambda model: check_canary(self.policy, ids, logprobs, None if parts else model))
            self._stale = False

    def forget_prefixes(self) -> None:
        """No key or value that was computed before is read again. Raises RuntimeError where vLLM refuses."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("--engine vllm: the prefix cache could not be reset: requests are still running")

    def _canary_logprobs(self) -> tuple[list[int], list[float]]:
        """The canary with one more token, sampled greedily, and vLLM's log-probs of all but the first (temperature 1).

        Two requests. The one that samples reads cached prefixes where there are any, so that a forgotten reset shows;
        the one that scores the canary itself never does.
        """
        prompt = [{"prompt_token_ids": list(self.canary)}]
        options = dict(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        [sampled] = self.llm.generate(prompt, vllm.SamplingParams(logprobs=0, **options), use_tqdm=False)
        [scored] = self.llm.generate(prompt, vllm.SamplingParams(prompt_logprobs=0, **options), use_tqdm=False)
        ids = [*self.canary, *sampled.outputs[0].token_ids]
        entries = [*scored.prompt_logprobs[1:], *sampled.outputs[0].logprobs]
        return ids, [entry[token].logprob for token, entry in zip(ids[1:], entries, strict=True)]

    # --------------------------------------------------------------------------------------------------------- turns

    def start(self, step: int, sampling: SamplingConfig | None = None, before: Sequence[Episode] = ()) -> None:
        """Begin a rollout batch, with the trainer's present weights."""
        self._begin(step, sampling)
        self.wake()

    def _begin(self, step: int, sampling: SamplingConfig | None) -> None:
        self._abort()
        self._ids.clear()
        self._step, self.sampling = step, sampling or self.default_sampling
        self._seed = self.seed if self.sampling.seed is None else self.sampling.seed
        if 0 < self.sampling.temperature < MIN_TEMPERATURE:
            raise UsageError(
                f"--engine vllm: temperature {self.sampling.temperature:g}: must be 0 or at least {MIN_TEMPERATURE:g} "
                "(vLLM would raise it to that)"
            )

    @property
    def num_active(self) -> int:
        """Episodes that have been submitted and not released."""
        return len(self._ids)

    def submit(self, request: TurnRequest) -> None:
        """Queue a turn.

        Raises:
            ValueError: nothing to sample from or no room, a turn of this episode is still running, or a prompt that
                rewrites the episode's past.
        """
        request.check(self.max_context)
        prompt, key = request.prompt_ids, request.key
        if any(running.key == key for running in self._running.values()):
            raise ValueError(f"episode {key} is still sampling its previous turn")
        past = self._ids.get(key, ())
        if prompt[: len(past)] != past:
            raise ValueError(f"turn {request.turn} of episode {key} does not begin with the turns before it")
        self._turns += 1
        name = f"{self._turns}"
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, self._parameters(request))
        self._running[name], self._ids[key] = request, prompt

    def _parameters(self, request: TurnRequest) -> Any:
        """Exactly what was configured: no filter but top-p, and no stop but the engine's eos ids and the length."""
        stream = random_stream(self._seed, self._step, *request.key, request.turn)
        return vllm.SamplingParams(
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p if self.sampling.temperature else 1.0,
            top_k=0,
            min_p=0.0,
            seed=int(stream[0] >> 1),  # 63 bits: vLLM keeps seeds in int64
            max_tokens=request.max_tokens,
            ignore_eos=True,
            stop_token_ids=sorted(self.eos_ids),
            logprobs=0,  # the sampled token's own
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def step(self) -> list[TurnOutput]:
        """One forward of vLLM: the turns that ended with it.

        Raises:
            FloatingPointError: the model's logits are not finite.
        """
        if not self._running:
            return []
        outputs = []
        for finished in self.llm.llm_engine.step():
            request = self._running.pop(finished.request_id, None) if finished.finished else None
            if request is None:
                continue
            [sampled] = finished.outputs
            ids = tuple(sampled.token_ids)
            # By id: vLLM may list the most probable token beside the sampled one.
            logprobs = tuple(entry[token].logprob for token, entry in zip(ids, sampled.logprobs, strict=True))
            if not ids or any(logprob != logprob for logprob in logprobs):
                raise FloatingPointError(f"episode {request.key}: the model's logits are not finite")
            self._ids[request.key] = request.prompt_ids + ids
            stopped = ids[-1] in self.eos_ids
            outputs.append(TurnOutput(request.key, ids, logprobs, "stop" if stopped else "length"))
        return outputs

    def release(self, key: Key) -> None:
        """The episode is over; a turn of it that is still running is dropped."""
        self._ids.pop(key, None)
        self._abort([name for name, request in self._running.items() if request.key == key])

    def _abort(self, names: list[str] | None = None) -> None:
        """Drop requests, all by default."""
        names = list(self._running) if names is None else names
        if names:
            self.llm.llm_engine.abort_request(names)
        for name in names:
            del self._running[name]


def _check_installation(policy: Policy) -> None:
    """Raises UsageError where this vLLM is not the one that was tested, or computes elsewhere than the policy."""
    version = tuple(vllm.__version_tuple__[:2])
    if version != TESTED:
        wanted = ".".join(map(str, TESTED))
        raise UsageError(f"--engine vllm: vLLM {vllm.__version__} is installed, {wanted} is needed; {INSTALL}")
    device = policy.device
    if current_platform.device_type != device.type:
        raise UsageError(
            f"--engine vllm: this vLLM computes on {current_platform.device_type}, the policy is on {device}; {INSTALL}"
        )
    if device.index not in (None, 0) and distributed.size() == 1:
        raise UsageError(
            f"--engine vllm: vLLM uses the first visible GPU; instead of --device {device} "
            f"set CUDA_VISIBLE_DEVICES={device.index}"
        )


@contextlib.contextmanager
def _settings_kept() -> Iterator[None]:
    """Starting vLLM changes settings of the process that the trainer runs in: they are put back."""
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision, state = torch.get_float32_matmul_precision(), torch.random.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = set_num_threads  # replaced by a function that does nothing
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.random.set_rng_state(state)
