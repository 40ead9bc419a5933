"""A checkpoint's tensors written by several processes, each its part, and read by any number of them.

    shard-00001-model-00001-of-00001.safetensors      what the first process has: its rows of every weight and moment
    shard-00002-...                                   the second's

PyTorch's distributed checkpoint does it, in its safetensors form, which holds no code. Where a part belongs is in its
file's header, so that another number of processes, or one, finds its rows. Names are those of a checkpoint that one
process wrote (`grpo.checkpoint`), which is read in the same way.
"""

from __future__ import annotations

import errno
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from grpo import distributed
from grpo.files import sha256
from grpo.lora import trained_weights
from grpo.shared_errors import shared

Moments = dict[int, dict[str, torch.Tensor]]


def write(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Write this process's part of the weights that are trained and of the optimiser's state. All come here.

    Returns:
        size and SHA-256 of every process's file, by its name.

    Raises:
        OSError: in all of them, where one could not write.
    """
    tensors = {names[0]: parameter.detach() for parameter, names in trained_weights(model).items()}
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{name}": tensor for name, tensor in values.items()}
    with _one_error():
        dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))
    mine = sorted(folder.glob(f"shard-{distributed.rank() + 1:05d}-*.safetensors"))
    parts = distributed.gather(
        lambda: {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in mine}
    )
    return {name: entry for part in parts for name, entry in part.items()}


def read(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Moments:
    """Read this process's part into the model, in place; the optimiser's state by the index of its parameter.

    Raises:
        ValueError, KeyError, OSError: the checkpoint is not of this model, or cannot be read.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder))
    there: dict[str, Any] = reader.read_metadata().state_dict_metadata
    weights = {}
    for parameter, names in trained_weights(model).items():
        weights[next((name for name in names if name in there), names[0])] = parameter.detach()
    moments: Moments = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        prefix = f"{index}."
        names = [key.removeprefix(prefix) for key in there if key.startswith(prefix) and key not in weights]
        if names:
            moments[index] = {
                name: torch.zeros_like(parameter.detach()) if there[prefix + name].size else torch.zeros(())
                for name in names
            }
    wanted = weights | {f"{i}.{name}": tensor for i, values in moments.items() for name, tensor in values.items()}
    if strange := there.keys() - wanted.keys() - dict(model.named_buffers()).keys():
        raise ValueError(f"it holds {sorted(strange)[0]}, which this model has not")
    for name, tensor in wanted.items():
        if name not in there or there[name].size != tensor.size():
            raise ValueError(f"{name} is missing, or of another shape")
    with _one_error():
        dcp.load(wanted, storage_reader=reader, no_dist=distributed.size() == 1)
    return moments


@contextmanager
def _one_error() -> Iterator[None]:
    """The library's exception holds one of each process that failed: the first of them is raised, in all."""
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointException as error:
        number, (cause, _) = min(error.failures.items())
        text = f"process {number} of {distributed.size()}: {cause}"
        raise shared(OSError(getattr(cause, "errno", None) or errno.EIO, text)) from error
