"""Several processes under `torchrun`: all that knows of ranks. With one process nothing here does anything.

    torchrun --nproc-per-node 8 train.py --beta 0.2

Weights, gradients, AdamW's moments and the reference are sharded over the N processes by PyTorch's FSDP2, a layer at a
time. Of a step's P groups each process plays every N-th, under the number that it has in the step: what is sampled is
a function of that number, so the N processes sample what one would. Then every process gets all groups (they are
tokens and texts, some kB each) and computes rewards, advantages and the weights of tokens over the whole step. Each
trains on its own groups, never on a part of one; gradients are summed, not averaged, since the weights of tokens hold
the normaliser of the whole step. The result is that of one process, up to the order of sums.

Where weights must be whole: while the in-process engine samples with them, while vLLM takes them over, and for the
reference's forward passes. Each process then holds all of them in float32, without gradients or activations; moments
and gradients never leave their shards.

What is said and written comes from the first process alone. The others learn what came out (`first`), its errors
included; an error anywhere is told once and ends all of them.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from grpo.config import RunStopped, UsageError
from grpo.data_types import Group, TokenBatch
from grpo.engines import Engine, Key, TurnOutput, TurnRequest
from grpo.shared_errors import attempt, sendable, teller, told
from grpo.tree_attention import Segment, TreeLayout
from scenarios.schema import Scenario

T = TypeVar("T")

PATIENCE = datetime.timedelta(minutes=30)
"""How long a process waits for another one that is alive but does not come: shares of a rollout differ in length."""

FAILED = "grpo/failed"
"""Key in torchrun's store: the process that told of the error that ends all."""

ENDED = "grpo/ended"
"""Key in torchrun's store, with a process's number behind it: it has left a run that all leave."""

LAST_WAIT = datetime.timedelta(minutes=1)
"""How long a process that leaves waits for the others: longer than trackers may take (`trackers.FINISH_SECONDS`)."""


def size() -> int:
    """The number N of processes; 1 without torchrun."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this one is, from 0."""
    return dist.get_rank() if size() > 1 else 0


def is_first() -> bool:
    """Is this the process that speaks and writes?"""
    return rank() == 0


# ------------------------------------------------------------------------------------------------ beginning and end


@contextlib.contextmanager
def session() -> Iterator[None]:
    """A run's processes, from flags to end. Without torchrun, or with one process, it does nothing.

    An exception that all processes share, or that only one has, is raised in one of them; the others exit silently with
    the same code. Those that share one wait for each other first: once a process has ended, torchrun kills the others,
    and the first may be uploading still. A process that dies takes the others with it: their connections to it break.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield
        return
    store, number, count = next(dist.rendezvous("env://", timeout=PATIENCE))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    # vLLM has groups inside this one until Python ends: it must outlive them. Of finalizers the oldest is the last.
    finished: list[bool] = []
    weakref.finalize(dist, lambda: dist.destroy_process_group() if finished and dist.is_initialized() else None)
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=PATIENCE)
    try:
        with open(os.devnull, "w") as nowhere:
            with contextlib.redirect_stdout(sys.stdout if number == 0 else nowhere):
                yield
        dist.barrier()  # nobody closes its connections while another is at work, and may fail still
    except BaseException as error:
        told_by = teller(error)
        if told_by is not None:
            _end_together(store, number, count)
        if not isinstance(error, (Exception, KeyboardInterrupt)):  # an exit that was asked for
            raise
        if told_by not in (None, number) or not _first_to_tell(store, number):
            raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
        if _connection_lost(error):
            raise RunStopped(f"process {number} of {count}: another one has died (connection lost)") from None
        raise
    finished.append(True)
    if "vllm" not in sys.modules:
        dist.destroy_process_group()


def _end_together(store: Any, number: int, count: int) -> None:
    """Wait until all processes have come here. One that does not, as it died on its way, costs a minute."""
    with contextlib.suppress(RuntimeError):  # too late, or torchrun itself is gone
        store.set(f"{ENDED}/{number}", "")
        store.wait([f"{ENDED}/{each}" for each in range(count)], LAST_WAIT)


def _first_to_tell(store: Any, number: int) -> bool:
    try:
        return store.compare_set(FAILED, "", str(number)).decode() == str(number)
    except RuntimeError:  # torchrun itself is gone
        return number == 0


def _connection_lost(error: BaseException) -> bool:
    """Is this what a collective raises where another process has died?"""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def device(name: str) -> torch.device:
    """The device of this process, for `--device NAME`: with several on a machine, each has a GPU of its own.

    Raises:
        UsageError: one device for all of them, or more processes than GPUs.
    """
    if size() == 1 or name == "cpu":
        return torch.device(name)
    if name != "cuda":
        raise UsageError(f"--device {name}: with several processes give cuda, each takes one GPU, or cpu")
    local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= there:
        raise UsageError(f"--nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}: this machine has {there} GPUs")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


# -------------------------------------------------------------------------------------------- what all of them know


def gather(function: Callable[[], T]) -> list[T]:
    """What `function()` gives in each process, in their order. What one of them raises, all raise."""
    mine = attempt(function)
    outcomes: list[Any] = [None] * size()
    dist.all_gather_object(outcomes, sendable(*mine))
    for number, (_, error) in enumerate(outcomes):
        if error is not None:
            raise told(error, number, mine[1] if number == rank() else None)
    return [value for value, _ in outcomes]


def first(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)`, called in the first process alone: all get what it gives, or raise what it raises."""
    if size() == 1:
        return function(*args)
    mine = attempt(lambda: function(*args)) if is_first() else (None, None)
    outcome = [sendable(*mine)]
    dist.broadcast_object_list(outcome, src=0)
    value, error = outcome[0]
    if error is not None:
        raise told(error, 0, mine[1])
    return value


def agreed(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)` in each process; what it raises in one, all raise."""
    return function(*args) if size() == 1 else gather(lambda: function(*args))[rank()]


def most(number: int) -> int:
    """The largest `number` among the processes."""
    if size() == 1:
        return number
    found = torch.tensor(number)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def total(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the processes' tensors, which have one shape."""
    if size() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
    return tensor


def merged(metrics: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Scalars by name, the same names in each process: their sums; of `..._max` the largest and of `..._min` the
    smallest."""
    if size() == 1 or not metrics:
        return metrics
    extremes = {name: -1.0 if name.endswith("_min") else 1.0 for name in metrics if name.endswith(("_max", "_min"))}
    largest = torch.stack([sign * metrics[name].double() for name, sign in extremes.items()])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    sums = total(torch.stack([value.double() for name, value in metrics.items() if name not in extremes]))
    found = dict(zip(extremes, largest * torch.tensor(list(extremes.values())).to(largest)))
    return found | dict(zip([name for name in metrics if name not in extremes], sums))


# ------------------------------------------------------------------------------------------------------ the rollouts


class Dealt:
    """An engine that plays every `count`-th scenario of a batch, from number `index`, as if it played all of them.

    The rollout loop counts the scenarios that it was given; the engine's seeds need their number in the whole batch.
    """

    def __init__(self, engine: Engine, index: int, count: int):
        self.engine, self.index, self.count = engine, index, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, request: TurnRequest) -> None:
        self.engine.submit(replace(request, key=self._whole(request.key), group=self._whole(request.key)[0]))

    def step(self) -> list[TurnOutput]:
        return [
            replace(output, key=((output.key[0] - self.index) // self.count, output.key[1]))
            for output in self.engine.step()
        ]

    def release(self, key: Key) -> None:
        self.engine.release(self._whole(key))

    def _whole(self, key: Key) -> Key:
        return self.index + self.count * key[0], key[1]


def play_all(
    engine: Engine, scenarios: Sequence[Scenario], play: Callable[[Engine, Sequence[Scenario]], list[Group]]
) -> list[Group]:
    """`play(engine, scenarios)`, each process its share: the groups of all scenarios, in their order, everywhere.

    Processes that form one engine together (`engine.tensor_parallel` of them) play the same share.
    """
    if size() == 1:
        return play(engine, scenarios)
    width = getattr(engine, "tensor_parallel", 1)
    index, count = rank() // width, size() // width
    parts = gather(lambda: play(Dealt(engine, index, count), scenarios[index::count]))[::width]
    return [parts[i % count][i // count] for i in range(len(scenarios))]


def share(number: int, tensor_parallel: int = 1) -> int:
    """The most of `number` scenarios that one engine plays."""
    return -(-number * tensor_parallel // size())


def owned(groups: Sequence[Group], weights: Sequence[float]) -> list[bool]:
    """Which of the step's episodes [E] this process trains on: whole groups; all where there is one process.

    Groups go to the process that has the fewest tokens so far, the largest first: a step takes as long as its slowest
    process.
    """
    if size() == 1:
        return [True] * len(weights)
    owners, load, start = [0] * len(groups), [0] * size(), 0
    costs = []
    for group in groups:
        trained = [e for e, weight in zip(group.episodes, weights[start:]) if weight > 0]
        costs.append(sum(len(e.completion_ids) for e in trained) + max((len(e.prompt_ids) for e in trained), default=0))
        start += len(group.episodes)
    for g in sorted(range(len(groups)), key=lambda g: (-costs[g], g)):
        owners[g] = load.index(min(load))
        load[owners[g]] += costs[g]
    return [owner == rank() for owner, group in zip(owners, groups) for _ in group.episodes]


# ------------------------------------------------------------------------------------------------------- the weights


def shard(model: Any, where: torch.device) -> None:
    """Shard the model's parameters over the processes, in place: each layer by itself, the rest (embedding, final norm,
    head, tied or not) together. Nothing where there is one process."""
    if size() == 1:
        return
    mesh = init_device_mesh(where.type, (size(),))
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    for module in [*layers, model]:
        fully_shard(module, mesh=mesh)
    for module in _sharded(model):
        # The sum of the processes' gradients: FSDP's default is their mean.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    # The head is computed by a kernel behind the decoder (`grpo.head`), not by the model's own forward.
    model.within_forward = lambda function: function()
    register_fsdp_forward_method(model, "within_forward")
    model.within_forward(lambda: None)  # FSDP takes the first that runs for the root,
    model.reshard()  # which keeps its weights whole behind a forward


def part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def within_forward(model: Any, function: Callable[[], T]) -> T:
    """`function()`, which uses the model's parts, as if it were its forward: sharded weights are gathered for it and
    for its backward pass, layer by layer. All processes must come here equally often."""
    run = getattr(model, "within_forward", None)
    return function() if run is None else run(function)


@contextlib.contextmanager
def whole(model: Any, when: bool = True) -> Iterator[None]:
    """Within, each process has all of the model's weights, and may compute with them as often as it likes, without
    gradients. All processes must come here; what is done inside may differ. `when` False: nothing happens."""
    modules = _sharded(model) if when else []
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(module is not model, recurse=False)


@contextlib.contextmanager
def awake(engine: Engine, model: Any) -> Iterator[None]:
    """Within, the engine may sample: whole weights for one that samples with the trainer's own, and for the time in
    which another takes them over."""
    from grpo.engines.torch_engine import TorchEngine

    in_place = isinstance(engine, TorchEngine)
    with whole(model):
        engine.wake()
        if in_place:
            yield
    if not in_place:
        yield


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor of which each process has a part; other tensors as they are. All processes must come here."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _sharded(model: Any) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


# -------------------------------------------------------------------------------------------------------- the update


def filler(packed: bool) -> TokenBatch:
    """A microbatch of one token of weight 0: what a process computes that has fewer microbatches than another."""
    zero, one = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    return TokenBatch(
        input_ids=one[None],
        position_ids=one[None],
        predict_rows=one,
        predict_cols=one,
        targets=one,
        episode_index=one,
        sampler_logprobs=zero,
        token_weights=zero,
        episodes=(),
        layout=TreeLayout([Segment(1, -1)]) if packed else None,
    )
