"""AdamW, with its moments in float32 or in 8 bits (`--optimizer`).

Both hold float32 weights: a learning rate of 5e-7 changes a bfloat16 weight by less than its rounding, so such a weight
would never move (`tests/test_optimizer.py` shows both). What `adamw8bit` saves is in the moments: one byte instead of
four for each of the two, and a float32 scale for each 256 of them (arXiv 2110.02861). A tensor of fewer than 4096
elements keeps float32 moments.

The 8-bit one is bitsandbytes': it runs on a CPU as well, is compiled already and takes its learning rate as a number,
where torchao's calls a C++ compiler at its first step and takes it as a tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from grpo.config import UsageError

INSTALL = 'pip install -e ".[adamw8bit]"'
BETAS = (0.9, 0.999)
NESTED = "__bnb_optimizer_quant_state__"  # where bitsandbytes puts an 8-bit state's tensors
MOMENT_BYTES = {"adamw": 8, "adamw8bit": 2}
"""Both moments of one weight."""


def make_optimizer(parameters: Iterable[torch.nn.Parameter], name: str, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW over those of `parameters` that are trained. No weight decay: it pulls towards zero, away from the base,
    whose anchor is `beta`.

    Args:
        name: `adamw` (PyTorch's, fused) or `adamw8bit`.

    Raises:
        UsageError: `adamw8bit` where bitsandbytes is not installed or does not load, or in one of several processes.
    """
    trained = [p for p in parameters if p.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(trained, lr=learning_rate, betas=BETAS, weight_decay=0.0, fused=True)
    ranks = torch.distributed
    if ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1:
        raise UsageError("--optimizer adamw8bit: runs in one process only; use adamw with several")
    return _adamw8bit()(trained, lr=learning_rate, betas=BETAS, weight_decay=0.0)


def quiet_bitsandbytes() -> None:
    """Before it is imported: on a CPU it warns of a missing kernel for 4-bit weights, which are not used here."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def plain_state(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """One parameter's state in bitsandbytes' form as tensors by name, no two of them in the same memory."""
    flat = {**state, **state.get(NESTED, {})}
    return {
        # All parameters share the two maps; safetensors wants each tensor in memory of its own.
        name: value.clone() if name.startswith("qmap") else torch.as_tensor(value)
        for name, value in flat.items()
        if name != NESTED
    }


def _adamw8bit() -> Callable[..., torch.optim.Optimizer]:
    """bitsandbytes' AdamW with a state that a checkpoint can hold: tensors by name, as PyTorch's has it."""
    quiet_bitsandbytes()
    try:
        import bitsandbytes
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "bitsandbytes"
        why = "needs bitsandbytes" if missing else f"bitsandbytes does not load ({str(error).splitlines()[0]})"
        raise UsageError(f"--optimizer adamw8bit: {why}: {INSTALL}") from None

    class PlainState(bitsandbytes.optim.AdamW8bit):
        def state_dict(self) -> dict[str, Any]:
            found = super().state_dict()
            return found | {"state": {index: plain_state(state) for index, state in found["state"].items()}}

        def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            state = {
                index: dict(values) | {"step": int(values["step"])} for index, values in state_dict["state"].items()
            }
            super().load_state_dict(state_dict | {"state": state}, *args, **kwargs)

    return PlainState
