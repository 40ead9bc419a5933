"""Loading a policy, and its hidden states at the positions that predict a trained token.

Weights are kept in float32 and computed with in `dtype` (bfloat16 through autocast): a learning rate of 5e-7 changes a
bfloat16 weight by less than its rounding, so bfloat16 weights would not move.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from grpo import cpu_linear, distributed, hints, tree_attention
from grpo.config import ModelConfig, UsageError
from grpo.data_types import TokenBatch
from grpo.lean_modules import keep_less
from grpo.lora import add_adapters

TINY_FOLDER = Path(__file__).parent / "tiny"


@dataclass(frozen=True)
class Policy:
    """A causal LM with its tokenizer. `dtype` is the compute type, the weights are float32."""

    name: str
    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    impl: str = "auto"
    """Which implementation of the kernels computes its head; see `grpo.head`."""

    def autocast(self) -> torch.autocast:
        """Context in which this policy computes; does nothing in float32."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    @property
    def num_parameters(self) -> int:
        """Parameters, tied tensors once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_trained(self) -> int:
        """Those that are trained: all, or the adapters."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)


def load_policy(config: ModelConfig) -> Policy:
    """Load `config.model`: the bundled `tiny`, a folder, or a hub id.

    Dropout is switched off for good: with it the policy would differ from the reference before any update.

    Raises:
        UsageError: missing folder, a folder that is not a causal LM, a tokenizer without chat template, or a model
            whose logits are not its head applied to its last hidden state.
    """
    device = _device(config.device)
    source = source_of(config.model)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        # A folder's own code is never run. Left out, the argument would have transformers ask at the terminal.
        model_config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"):
            if getattr(model_config, name, None):
                setattr(model_config, name, 0.0)
        model, report = AutoModelForCausalLM.from_pretrained(
            source, config=model_config, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # a damaged folder raises almost anything, from seven libraries
        raise UsageError(f"--model {config.model}: not a loadable causal language model ({one_line(error)})") from error
    missing = sorted(report["missing_keys"])
    if missing:  # they would be filled with random numbers
        raise UsageError(f"--model {config.model}: {len(missing)} weights are not in its files, such as {missing[0]}")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.to(device).eval()
    if device.type == "cpu":
        cpu_linear.use(model)
    keep_less(model)  # behind it: modules are compared with what they are now
    dtype = {"auto": torch.bfloat16 if device.type == "cuda" else torch.float32}.get(config.dtype)
    policy = Policy(config.model, model, tokenizer, device, dtype or getattr(torch, config.dtype), config.impl)
    _check_head(policy)
    if config.lora_rank:
        add_adapters(model, config.lora_rank)
    return policy


def load_tokenizer(name: str) -> tuple[Any, Any]:
    """Tokenizer and generation config of a model whose weights are elsewhere, on a server.

    Raises:
        UsageError: no such model, or no tokenizer in it.
    """
    source = source_of(name)
    transformers_logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        try:
            generation_config = GenerationConfig.from_pretrained(source)
        except OSError:  # none in the folder: what a loaded model would have
            generation_config = GenerationConfig.from_model_config(
                AutoConfig.from_pretrained(source, trust_remote_code=False)
            )
    except Exception as error:  # as in `load_policy`
        raise UsageError(f"--model {name}: its tokenizer cannot be loaded ({one_line(error)})") from error
    return tokenizer, generation_config


def one_line(error: BaseException) -> str:
    """The first line of an error, with its kind where that says more."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if len(text) < 20 else text


def fingerprint(policy: Policy) -> str:
    """SHA-256 of a model's weights (shape, sum and sum of squares of each tensor), vocabulary and chat template.

    Adapters do not count, so that it is the base's."""
    digest = hashlib.sha256()
    state = policy.model.state_dict().items()
    state = {name.replace(".base_layer.", "."): tensor for name, tensor in state if ".lora_" not in name}
    for name, tensor in sorted(state.items()):
        values = distributed.full(tensor).double()
        digest.update(f"{name} {tuple(tensor.shape)} {values.sum():.12e} {values.square().sum():.12e}\n".encode())
    digest.update(repr(sorted(policy.tokenizer.get_vocab().items())).encode())
    digest.update(repr(policy.tokenizer.chat_template).encode())
    return digest.hexdigest()


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = distributed.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: not available ({str(error).splitlines()[0]})") from error
    return device


def source_of(name: str) -> str:
    """What transformers shall load. A path that is not there never turns into a hub lookup."""
    if name == "tiny":
        return str(TINY_FOLDER)
    path = Path(name)
    if path.is_dir():
        if hints.is_run(path):
            raise UsageError(f"--model {name}: is a run, not a model{hints.model(name)}")
        if not (path / "config.json").is_file():
            what = "no config.json in this folder; give a Hugging Face model folder"
            raise UsageError(f"--model {name}: {what}{hints.model(name)}")
        return name
    if path.exists():
        raise UsageError(f"--model {name}: is a file; give a Hugging Face model folder{hints.model(name)}")
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or path.parent.is_dir():
        what = "no such folder; give `tiny`, a model folder or a hub id (owner/name)"
        raise UsageError(f"--model {name}: {what}{hints.model(name)}")
    return name


def _check_head(policy: Policy) -> None:
    """Some models scale or cap logits after their head; the training path would then use wrong log-probs."""
    ids = torch.arange(4, device=policy.device)[None] % policy.model.config.get_text_config().vocab_size
    with torch.no_grad():
        expected = policy.model(input_ids=ids, use_cache=False).logits
        hidden = decoder(policy.model)(ids, use_cache=False).last_hidden_state
        head = policy.model.get_output_embeddings()
        actual = torch.nn.functional.linear(hidden, head.weight, getattr(head, "bias", None))
    if not torch.isfinite(expected).all():
        raise UsageError(f"--model {policy.name}: its logits are not finite; the weights are damaged")
    if not torch.allclose(expected.float(), actual.float(), atol=1e-4, rtol=1e-4):
        raise UsageError(f"--model {policy.name}: changes logits after its head (scaling or capping): not supported")


def decoder(model: Any) -> torch.nn.Module:
    """The model without its LM head."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model.base_model


def hidden_states(policy: Policy, batch: TokenBatch) -> torch.Tensor:
    """Last hidden states at the batch's predicting positions: [N, D].

    A packed batch needs `enable_packing` first, else RuntimeError. A padded one passes no attention mask: its rows are
    padded on the right and attention is causal, so padding is never seen, and without a mask the attention kernel
    skips the upper triangle.
    Gradient checkpointing acts in training mode only; dropout is off, so the mode changes nothing else.
    """
    options: dict[str, Any] = {}
    if batch.layout is not None:
        if policy.model.config.get_text_config()._attn_implementation != tree_attention.ATTENTION_NAME:
            raise RuntimeError("a packed batch, but the model has no tree attention: call enable_packing first")
        # transformers takes a 4-D mask as it is, and so builds none of its own; tree attention does not look at it.
        options = {"tree_layout": batch.layout, "attention_mask": batch.input_ids.new_zeros(1, 1, 1, 1)}
    policy.model.train(torch.is_grad_enabled())
    with policy.autocast():
        output = decoder(policy.model)(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **options
        )
    policy.model.eval()
    hidden = output.last_hidden_state  # [R, T, D]
    # Not hidden[rows, cols]: its backward adds what falls on one position (a prompt's last token predicts for every
    # member of its group) in the order in which threads come, so that two runs differ in the last digits.
    return hidden.flatten(0, 1).index_select(0, batch.predict_rows * hidden.shape[1] + batch.predict_cols)  # [N, D]


def enable_packing(policy: Policy, max_context: int) -> str | None:
    """Give the model tree attention. Returns None, or why it cannot have it; the model is unchanged then.

    Args:
        max_context: longest conversation in tokens.
    """
    config = policy.model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    name = type(policy.model).__name__
    strange = kinds - {"full_attention", "sliding_attention"}
    if strange or getattr(policy.model, "_is_stateful", False):
        return f"{name} has layers that are not full attention ({', '.join(sorted(strange)) or 'state'})"
    if window is not None and window < max_context:
        return f"{name} attends over a window of {window} tokens, an episode may have {max_context}"
    try:
        reason = _try_packing(policy)
    except (UsageError, TypeError, AttributeError, RuntimeError) as error:
        reason = one_line(error)
    return f"{name}: {reason}" if reason else None


@torch.no_grad()
def _try_packing(policy: Policy) -> str | None:
    """Two branches behind one prompt, one by one with the model's own attention and then packed with tree attention:
    the same hidden states, or the model keeps its own."""
    config = policy.model.config.get_text_config()
    prompt, *branches = (
        [(7 * i + k) % config.vocab_size for i in range(length)] for k, length in ((3, 5), (1, 4), (2, 6))
    )

    def hidden(ids: list[int], positions: torch.Tensor, **options: Any) -> torch.Tensor:
        with policy.autocast():
            output = decoder(policy.model)(
                input_ids=torch.tensor([ids], device=policy.device),
                position_ids=positions[None].to(policy.device),
                use_cache=False,
                **options,
            )
        return output.last_hidden_state[0].float()

    alone = [hidden(prompt + branch, torch.arange(len(prompt + branch)))[len(prompt) :] for branch in branches]
    segment = tree_attention.Segment
    layout = tree_attention.TreeLayout([segment(len(prompt), -1), *(segment(len(branch), 0) for branch in branches)])
    before, config._attn_implementation = config._attn_implementation, tree_attention.ATTENTION_NAME
    accepted = False
    try:
        dummy = torch.zeros(1, 1, 1, 1, device=policy.device)
        ids = prompt + branches[0] + branches[1]
        packed = hidden(ids, layout.positions(), tree_layout=layout, attention_mask=dummy)[len(prompt) :]
        difference = (packed - torch.cat(alone)).abs().max() / torch.cat(alone).abs().max()
        accepted = bool(difference < (1e-4 if policy.dtype == torch.float32 else 0.1))
    finally:
        if not accepted:
            config._attn_implementation = before
    return None if accepted else "gives other hidden states packed than alone"
