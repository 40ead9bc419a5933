"""What training adds to `vllm serve`: workers that take the trainer's weights over the network.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out \\
        --worker-extension-cls grpo.engines.server_worker.WeightReceiver

vLLM mixes this class into its worker's. Its methods are called by the trainer (`server_weights`) at `/collective_rpc`,
in every worker of a server, while nothing is sampled; what goes wrong is returned, as {"error": text}, since of what is
raised here only a number would reach the trainer. Nothing but torch and vLLM has to be installed beside this package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from grpo.engines.vllm_tensors import Expected, differing_checksums, repack_heads
from grpo.engines.weight_channel import LOST, Channel, answers, find_store, own_address

Answer = dict[str, Any]


def answering(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """An exception becomes the answer; the channel is closed then, so that the trainer does not wait for this end."""

    @functools.wraps(method)
    def call(self: Any, *args: Any) -> Answer:
        try:
            return method(self, *args)
        except Exception as error:  # noqa: BLE001 (whatever it is, the trainer has to hear of it)
            self._grpo_channel = None
            text = " ".join(str(error).split())
            lost = "gloo" in text  # with the place in its source
            return {"error": LOST if lost else f"{type(error).__name__}: {text[:300]}"}

    return call


class WeightReceiver:
    """A mix-in for vLLM's worker. A server has one trainer at a time: another one is refused while that one lives."""

    _grpo_trainer = ""
    _grpo_store: Any = None
    _grpo_channel: Channel | None = None

    @answering
    def grpo_describe(self) -> Answer:
        """What decides whether this server can be trained with."""
        worker: Any = self
        config, parallel = worker.model_config, worker.parallel_config
        types = {p.dtype for p in worker.get_model().parameters() if p.is_floating_point()}
        return {
            "workers": parallel.world_size,
            "replicas": parallel.data_parallel_size,
            "dtype": _name(config.dtype),
            "widest": _name(max(types, key=lambda dtype: dtype.itemsize)),
            "quantization": config.quantization,
            "logprobs_mode": str(config.logprobs_mode),
        }

    @answering
    def grpo_meet(self, trainer: str, address: str, port: int) -> Answer:
        """Connect to a new trainer's store."""
        if self._grpo_store is not None and answers(self._grpo_store):
            return {"busy": self._grpo_trainer}
        self._grpo_channel = None
        self._grpo_store, self._grpo_trainer = find_store(address, port), trainer
        return {}

    @answering
    def grpo_join(self, trainer: str, name: str, address: str, port: int) -> Answer:
        """Open this worker's end of the channel; all workers and the trainer do so at the same time."""
        self._grpo_check(trainer)
        worker: Any = self
        size = worker.parallel_config.world_size + 1
        self._grpo_channel = Channel(self._grpo_store, name, worker.rank + 1, size, own_address(address, port))
        return {}

    @answering
    def grpo_load(self, trainer: str, names: Sequence[str], shapes: Sequence[Sequence[int]], dtype: str) -> Answer:
        """Take every weight, in the order of `names`, and load it as vLLM loads a checkpoint."""
        worker: Any = self
        weights = self._grpo_received(trainer, names, shapes, dtype)
        try:
            worker.reload_weights(weights_iterator=weights, is_checkpoint_format=True)
        except Exception:
            self._grpo_recover()
            raise
        for name, _ in weights:
            raise RuntimeError(f"{name} was not taken")
        repack_heads(worker.get_model())
        return {}

    @answering
    def grpo_compare(self, trainer: str, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Answer:
        """Take the checksums of the trainer's weights; name the tensors here that have another one."""
        worker: Any = self
        lengths = [shape[:1] for shape in shapes]
        received = list(self._grpo_received(trainer, names, lengths, "float32"))
        if worker.parallel_config.world_size > 1:  # here is a part of each tensor
            return {"differ": []}
        expected = {
            name: Expected(tuple(shape), functools.partial(_given, values))
            for (name, values), shape in zip(received, shapes, strict=True)
        }
        with torch.inference_mode():
            return {"differ": differing_checksums(expected, worker.get_model())}

    def _grpo_recover(self) -> None:
        """Layers that did not get all weights have no memory, and the next request would end the server: they get back
        what they had, for another trainer."""
        worker: Any = self
        if (vllm_config := getattr(worker, "vllm_config", None)) is not None:
            from vllm.config import set_current_vllm_config
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            with set_current_vllm_config(vllm_config):
                finalize_layerwise_reload(worker.get_model(), worker.model_config)

    def _grpo_received(
        self, trainer: str, names: Sequence[str], shapes: Sequence[Sequence[int]], dtype: str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self._grpo_check(trainer)
        for name, shape in zip(names, shapes, strict=True):
            assert self._grpo_channel is not None
            yield name, self._grpo_channel.receive(tuple(shape), getattr(torch, dtype))

    def _grpo_check(self, trainer: str) -> None:
        if trainer != self._grpo_trainer or self._grpo_store is None:
            raise RuntimeError("does not know this trainer; was the server restarted?")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _given(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values
