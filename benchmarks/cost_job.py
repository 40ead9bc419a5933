"""A step on many GPUs: data-parallel ranks with FSDP2, each with its groups, and samplers on the same GPUs.

Built from `cost_model.py`: links, memory, and the phases of a synchronous step. A rank's groups are never split; all
ranks wait for the longest episode of the job, then for each other's gradients.

`lean` is what this repository does not do, and larger models need. As it is (`grpo/distributed.py`), weights travel in
float32, each GPU holds all of them while its sampler takes them over and while the reference is computed, and autocast
keeps a bfloat16 copy of each until the backward pass has used it. Lean: FSDP2's mixed precision, so that weights travel
in bfloat16, and never more than a few layers of them at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from cost_machines import Machine
from cost_model import (
    Lengths,
    Shape,
    Work,
    adamw_seconds,
    decode_seconds,
    prefill_seconds,
    reference_seconds,
    update_seconds,
    work,
)

from grpo.engines.vllm_memory import ASLEEP_BYTES, USABLE, WORKING_BYTES


def collective_seconds(machine: Machine, size: float, gpus: int, messages: int = 1) -> float:
    """An all-gather or a reduce-scatter of `size` bytes in all, in so many messages, over `gpus` GPUs.

    Every GPU takes in (or gives out) what it lacks through NVLink, every node through its NICs together; a message
    goes round a ring of all GPUs.
    """
    if gpus == 1:
        return 0.0
    nodes = math.ceil(gpus / machine.gpus_per_node)
    inside = size * (gpus - 1) / gpus / machine.nvlink
    between = size * (nodes - 1) / nodes / (machine.gpus_per_node * machine.nic) if nodes > 1 else 0.0
    return max(inside, between) + messages * (gpus - 1) * machine.hop_seconds


def gather_seconds(shape: Shape, machine: Machine, gpus: int, lean: bool) -> float:
    """All weights once, a unit a layer and one for embedding and head."""
    return collective_seconds(machine, (2 if lean else 4) * shape.parameters, gpus, shape.layers + 1)


def fsdp_seconds(shape: Shape, machine: Machine, gpus: int, microbatches: int, lean: bool) -> float:
    """FSDP2 in an update: weights gathered in each forward and once more in its backward, float32 gradients reduced and
    scattered."""
    scattered = collective_seconds(machine, 4 * shape.parameters, gpus, shape.layers + 1)
    return microbatches * (2 * gather_seconds(shape, machine, gpus, lean) + scattered)


def sync_seconds(shape: Shape, machine: Machine, gpus: int, tp: int, lean: bool) -> float:
    """Weights for a sampler on the same GPUs: gathered, and on each GPU read and written where its sampler has them."""
    moved = 4 + 2 / tp if gpus == 1 else 4 / gpus + 2 * (2 if lean else 4) + 2 / tp
    return gather_seconds(shape, machine, gpus, lean) + moved * shape.parameters / machine.bandwidth


@dataclass(frozen=True)
class Job:
    """A step of `groups` groups a rank, `members` episodes each, at most `limit` tokens behind the prompt."""

    shape: Shape
    machine: Machine
    gpus: int
    groups: int
    lengths: Lengths
    """Already scaled to `limit`."""
    members: int = 8
    prompt: int = 600
    shared: int = 500
    limit: int = 768
    microbatch_tokens: int = 8192
    reference: bool = True
    slots: int = 64
    """Episodes that a GPU samples at once (--max-concurrent); others wait for a place."""
    total: int = 0
    """Groups of all ranks. 0: as many on each."""
    lean: bool = False

    @property
    def work(self) -> Work:
        """Of one rank."""
        return work(self.groups, self.members, self.prompt, self.shared, self.lengths.completion,
                    float(self.lengths.sampled.mean()), self.microbatch_tokens)  # fmt: skip

    @property
    def episodes(self) -> int:
        """Of all ranks."""
        return (self.total or self.gpus * self.groups) * self.members


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU."""

    state: float  # float32 weights, gradients, two moments
    reference: float
    activations: float  # of the largest microbatch
    whole: float  # all weights, in the hand-over to the sampler and in the reference's forward
    copies: float  # bfloat16 copies in the update, and the largest unit's whole weights and gradient
    sampler: float  # vLLM's weights and working memory
    kv_cache: float

    @property
    def rollout(self) -> float:
        """Its beginning, when the sampler takes the weights over."""
        return self.state + self.reference + self.whole + self.sampler + self.kv_cache

    @property
    def update(self) -> float:
        """vLLM asleep."""
        return self.state + self.reference + self.activations + self.copies + ASLEEP_BYTES


def memory(job: Job, tp: int = 1, checkpointing: bool = False) -> Memory:
    shape, gpus = job.shape, job.gpus
    largest = min(job.work.unique, job.microbatch_tokens)
    unit = max(shape.head * (1 if shape.tied else 2), shape.layer_matrices)
    # A unit's weights and float32 gradient, and the weights of the layer that is fetched ahead.
    copies = 0 if gpus == 1 else (6 if job.lean else 8) * unit + (2 if job.lean else 4) * shape.layer_matrices
    if gpus == 1 or not job.lean:
        copies += 2 * shape.parameters
    cached = min(job.slots, job.groups * job.members) * (job.prompt + job.limit)
    return Memory(
        state=16 * shape.parameters / gpus,
        reference=4 * shape.parameters / gpus * job.reference,
        activations=largest * shape.size.activation_bytes_per_token(checkpointing),
        whole=0.0 if gpus == 1 or job.lean else 4 * shape.parameters,
        copies=copies,
        sampler=shape.parameters * 2 / tp + WORKING_BYTES,
        kv_cache=cached * shape.kv_bytes(2),  # an engine of tp GPUs has tp ranks' episodes
    )


def plan(job: Job) -> tuple[int, bool] | None:
    """The tensor parallelism that samples fastest, and whether to compute activations again (only where they do not
    fit). None: it fits with neither."""
    usable = USABLE * job.machine.memory
    fitting = [tp for tp in widths(job) if memory(job, tp).rollout <= usable]
    again = next((each for each in (False, True) if memory(job, 1, each).update <= usable), None)
    if again is None or not fitting:
        return None
    return min(fitting, key=lambda tp: rollout_seconds(job, tp)), again


def widths(job: Job) -> list[int]:
    """Of tensor parallelism: inside a node, and each GPU has its own key heads."""
    return [tp for tp in (1, 2, 4, 8) if tp <= min(job.gpus, job.machine.gpus_per_node, job.shape.key_heads)]


@dataclass(frozen=True)
class Step:
    """Seconds of a step by phase."""

    rollout: float
    sync: float
    reference: float
    update: float  # the optimiser included
    waiting: float  # of reference and update for links, beyond their own work
    links: float  # that links are busy in these two, mostly beside the work
    sampled: float  # tokens, of all ranks
    tp: int
    checkpointing: bool

    @property
    def seconds(self) -> float:
        return self.rollout + self.sync + self.reference + self.update + self.waiting


def rollout_seconds(job: Job, tp: int = 1) -> float:
    """Until the longest episode of the whole job has ended: the ranks wait for each other.

    Where there are more episodes than slots, all slots are busy until the last ones have theirs.
    """
    episodes, lengths = tp * job.groups * job.members, job.lengths
    slots, mean = min(tp * job.slots, episodes), float(job.lengths.sampled.mean())
    position = np.arange(math.ceil(lengths.longest(job.episodes)))
    rows = np.maximum(1, slots * lengths.live(position))
    growth = float(lengths.completion.mean()) / mean  # replies make a context longer too
    keys = rows * (job.prompt + growth * position)
    full = np.full(math.ceil((episodes - slots) * mean / slots), float(slots))
    average = job.prompt + float((lengths.completion * lengths.sampled).mean()) / mean / 2  # of the tokens' contexts
    rows, keys = np.concatenate([full, rows]), np.concatenate([full * average, keys])
    decode = decode_seconds(job.shape, job.machine, rows, keys, tp)
    replies = float((lengths.completion - lengths.sampled).mean())
    own = job.prompt - job.shared
    tokens = job.shared + tp * job.groups * own + episodes * replies
    pairs = job.shared**2 / 2 + tp * job.groups * own * job.prompt + episodes * replies * (job.prompt + job.limit / 2)
    return decode + prefill_seconds(job.shape, job.machine, tokens, pairs, tp)


def fitted(job: Job) -> Job | None:
    """The job, or where it does not fit its lean form; None where that does not fit either."""
    return next((each for each in (job, replace(job, lean=True)) if plan(each)), None)


def step(job: Job) -> Step | None:
    """None where the memory of a GPU is too small for it."""
    chosen = plan(job)
    if chosen is None:
        return None
    (tp, checkpointing), load = chosen, job.work
    reference = reference_seconds(job.shape, job.machine, load) * job.reference
    update = update_seconds(job.shape, job.machine, load, checkpointing)
    gather = gather_seconds(job.shape, job.machine, job.gpus, job.lean)
    scoring = (load.microbatches if job.lean else 1) * gather * job.reference
    training = fsdp_seconds(job.shape, job.machine, job.gpus, load.microbatches, job.lean)
    # FSDP2 fetches the next layer while this one computes: what is waited for is what the links take longer. Whole
    # weights are waited for.
    waiting = max(0.0, scoring - reference * job.lean) + max(0.0, training - update)
    return Step(
        rollout=rollout_seconds(job, tp),
        sync=sync_seconds(job.shape, job.machine, job.gpus, tp, job.lean),
        reference=reference,
        update=update + adamw_seconds(job.shape, job.machine, job.gpus),
        waiting=waiting,
        links=scoring + training,
        sampled=job.episodes * float(job.lengths.sampled.mean()),
        tp=tp,
        checkpointing=checkpointing,
    )


def spread(job: Job, groups: int) -> Job:
    """The same with `groups` groups in all, none of which is split: the fullest rank's share."""
    return replace(job, groups=math.ceil(groups / job.gpus), total=groups)


def overlapped(job: Job) -> tuple[int, float] | None:
    """Whole nodes that only sample while the others train on the batch before (one step off-policy): how many GPUs of
    them make the step shortest, and its seconds. Not done in this repository. None: it fits with no split."""
    best = None
    node, groups = job.machine.gpus_per_node, job.gpus * job.groups
    for servers in range(node, job.gpus, node):
        trainers = fitted(spread(replace(job, gpus=job.gpus - servers), groups))
        training = step(trainers) if trainers else None
        sampling = serving(spread(replace(job, gpus=servers), groups))
        if training is None or sampling is None:
            continue
        seconds = max(sampling, training.seconds - training.rollout)
        if best is None or seconds < best[1]:
            best = servers, seconds
    return best


def serving(job: Job) -> float | None:
    """Seconds of the rollouts on GPUs that vLLM has to itself, with as many slots as fit."""
    found = []
    for tp in widths(job):
        need = memory(replace(job, slots=1), tp)
        slots = int((USABLE * job.machine.memory - need.sampler) // need.kv_cache)
        if slots > 0:
            found.append(rollout_seconds(replace(job, slots=slots), tp))
    return min(found, default=None)
