"""Tensors from the trainer to the workers of one vLLM server, over TCP: a small process group of gloo.

The trainer is its rank 0 and has the store in which they find each other; both sides use the network interface that the
route to the other one takes. A group of its own for each server, beside torch's default one, which has only the
trainer's processes. Nothing here imports more than torch: the server uses it too.

A GPU's tensors pass through host memory. NCCL would be faster, but cannot join two processes on one GPU and needs the
same release on both sides.
"""

from __future__ import annotations

import datetime
import socket
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

JOIN_SECONDS = 60  # until all workers have come
ALIVE_SECONDS = 10  # a store that does not answer in this time is that of a trainer that is gone
TRANSFER_SECONDS = 120  # for one tensor
LOST = "lost the connection to the trainer"  # what a worker says that has no fault of its own


def own_address(host: str, port: int) -> str:
    """The address of this machine on the way to another one; IPv4 where there is one. Raises OSError without a way."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, *_, there = min(found, key=lambda each: each[0] != socket.AF_INET)
    with socket.socket(family, kind) as probe:  # nothing is sent
        probe.connect(there)
        return str(probe.getsockname()[0])


def make_store() -> TCPStore:
    """The trainer's: workers meet it at `port` of this machine. It ends with the process that made it."""
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def find_store(address: str, port: int) -> TCPStore:
    """The trainer's store, from elsewhere. Raises RuntimeError where it cannot be reached."""
    return TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=ALIVE_SECONDS))


def answers(store: Store) -> bool:
    """Is the process that made this store still there?"""
    try:
        store.check(["anything"])
    except RuntimeError:
        return False
    return True


class Channel:
    """One end of it. `rank` 0 sends to the other `size` - 1, which receive what it sends in the same order.

    Raises:
        RuntimeError: somebody does not come within a minute; later, somebody is gone.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, address: str):
        gloo: Any = ProcessGroupGloo  # torch's type does not know all that it has
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = datetime.timedelta(seconds=JOIN_SECONDS)
        self._group = gloo(PrefixStore(name, store), rank, size, options)

    def send(self, tensor: torch.Tensor) -> Work:
        """Hand over a tensor in host memory to every worker; to be waited for."""
        return self._broadcast(tensor.contiguous())

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What the trainer sends next: a tensor in host memory."""
        tensor = torch.empty(shape, dtype=dtype)
        self._broadcast(tensor).wait()
        return tensor

    def _broadcast(self, tensor: torch.Tensor) -> Work:
        # As bytes: every type then is one that gloo knows.
        patience = datetime.timedelta(seconds=TRANSFER_SECONDS)
        work: Work = self._group.broadcast(tensor.reshape(-1).view(torch.uint8), 0, patience)
        return work
