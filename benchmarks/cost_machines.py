"""Machines of the cost model: peaks from data sheets, and how much of a peak is reached, which is assumed.

Nothing here was measured on a GPU. Each `*_PEAK` is a vendor's figure; each fraction and latency below is an
assumption, chosen once and not fitted to anything. The CPU's rates are measured ones: `cost_check.calibrated`.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30

# NVIDIA A100 80GB SXM data sheet (2021): bfloat16 tensor cores, dense; HBM2e; NVLink 600 GB/s in both directions
# together. NICs: DGX A100, one of 200 Gb/s a GPU.
A100_FLOPS_PEAK, A100_BANDWIDTH_PEAK, A100_NVLINK_PEAK, A100_NIC_PEAK = 312e12, 2.039e12, 300e9, 25e9
# NVIDIA H100 80GB SXM data sheet (2023): 1,979 TFLOP/s with sparsity, half of that dense; HBM3; NVLink 900 GB/s in both
# directions together. NICs: DGX H100, one of 400 Gb/s a GPU.
H100_FLOPS_PEAK, H100_BANDWIDTH_PEAK, H100_NVLINK_PEAK, H100_NIC_PEAK = 989e12, 3.35e12, 450e9, 50e9
# NVIDIA H200 SXM data sheet (2024): the H100's chip and links with 141 GB of HBM3e.
H200_BANDWIDTH_PEAK = 4.8e12
CARD_BYTES = {"a100": 79 * GIB, "h100": 79 * GIB, "h200": 139 * GIB}  # what CUDA reports of 80 and 141 GB, about

# Assumed: shares of those peaks.
GEMM_SHARE = {"a100": 0.6, "h100": 0.45, "h200": 0.45}  # of large bfloat16 GEMMs in eager PyTorch
BANDWIDTH_SHARE = 0.7  # of reads of weights and KV cache, and of elementwise kernels
LINK_SHARE = 0.7  # of NVLink and of the NICs, in all-gather and reduce-scatter
# Assumed: what costs time without moving or computing anything.
HOP_SECONDS = 3e-6  # a step of a ring, of which a collective over n GPUs takes n - 1
REDUCE_SECONDS = 15e-6  # a small all-reduce inside a node: two a layer and forward in tensor-parallel sampling
DECODE_SECONDS = 3e-3  # a forward of vLLM beside the device's work: scheduler, sampling, the rollout loop
ROW_SECONDS = 20e-6  # the host's work for each live episode in it
LAYER_SECONDS = 0.3e-3  # a layer's forward in eager PyTorch: launches that are not hidden


@dataclass(frozen=True)
class Machine:
    """Rates that are reached, per device. `logit_bytes`: what the row kernel of the head moves per logit."""

    name: str
    flops: float
    bandwidth: float  # bytes/s of main memory
    memory: float = 0.0  # bytes
    weight_bytes: int = 2  # of a sampler's weight and of a key or value
    logit_bytes: int = 6  # bfloat16: two reads and a write (Triton)
    decode_seconds: float = DECODE_SECONDS
    decode_layer_seconds: float = 0.0
    row_seconds: float = ROW_SECONDS
    layer_seconds: float = LAYER_SECONDS
    reduce_seconds: float = REDUCE_SECONDS
    hop_seconds: float = HOP_SECONDS
    gpus_per_node: int = 8
    nvlink: float = 0.0  # bytes/s out of one GPU
    nic: float = 0.0  # bytes/s out of one GPU's NIC


def gpu(name: str, flops: float, bandwidth: float, nvlink: float, nic: float) -> Machine:
    return Machine(
        name,
        GEMM_SHARE[name] * flops,
        BANDWIDTH_SHARE * bandwidth,
        CARD_BYTES[name],
        nvlink=LINK_SHARE * nvlink,
        nic=LINK_SHARE * nic,
    )


MACHINES = {
    "a100": gpu("a100", A100_FLOPS_PEAK, A100_BANDWIDTH_PEAK, A100_NVLINK_PEAK, A100_NIC_PEAK),
    "h100": gpu("h100", H100_FLOPS_PEAK, H100_BANDWIDTH_PEAK, H100_NVLINK_PEAK, H100_NIC_PEAK),
    "h200": gpu("h200", H100_FLOPS_PEAK, H200_BANDWIDTH_PEAK, H100_NVLINK_PEAK, H100_NIC_PEAK),
}
