"""What a head reads from the target: the residual stream entering a few decoder layers, and the state before the
final norm.

Names carry shapes: n tokens, H hidden size, A aux layers, V vocabulary.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from components.section import ConfigError

INDEX_FILE = "model.safetensors.index.json"


class TeacherWeights(NamedTuple):
    """softmax(lm_head(norm(last_hidden))) is the teacher."""

    norm_H: Tensor
    eps: float
    lm_head_VH: Tensor
    embed_VH: Tensor


class Captured(NamedTuple):
    aux_hidden: Tensor
    """[n, A*H], in the order of the aux layers."""
    last_hidden: Tensor
    """[n, H], before the final norm."""


def load_target(path: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The target in eval mode without gradients, in `dtype` on `device`, without remote code."""
    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, trust_remote_code=False)
    return model.to(device).eval().requires_grad_(False)


def teacher_weights(path: str | Path) -> TeacherWeights:
    """The target's norm [H], eps, lm_head [V, H] and embedding [V, H], read from its safetensors as stored.

    A tied target has one tensor: it is returned as both lm_head and embedding.

    Raises:
        ConfigError: at `target.model`, when a tensor is missing or quantised.
    """
    folder = Path(path)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    embed = _read_tensor(folder, "model.embed_tokens.weight")
    lm_head = embed if config.tie_word_embeddings else _read_tensor(folder, "lm_head.weight")
    return TeacherWeights(_read_tensor(folder, "model.norm.weight"), config.rms_norm_eps, lm_head, embed)


def capture(
    model: PreTrainedModel,
    input_ids: Tensor,
    aux_layers: Sequence[int],
    document_lengths: Sequence[int] | None = None,
) -> Captured:
    """Run the target over one document, or several packed one after another, and keep what a head reads.

    Packed documents start at position 0 each and do not see one another, so the result is that of each alone. The
    lm_head is not run. States are taken at the layers themselves: transformers' own `hidden_states[-1]` is after the
    final norm, and one that is normed again is wrong.

    Args:
        model: From `load_target`.
        input_ids: [1, n].
        aux_layers: Layer i stands for the residual stream entering decoder layer i.
        document_lengths: Lengths that sum to n; None for one document.

    Returns:
        aux_hidden [n, A*H] and last_hidden [n, H], in the model's dtype, on its device.

    Raises:
        ValueError: document lengths that are not positive or do not sum to n.
    """
    position_ids = _positions(input_ids, document_lengths)
    decoder = model.get_decoder()
    with _recording(decoder.layers, aux_layers) as states, torch.inference_mode():
        # without a mask and a cache, transformers takes a position that does not go on by one for a new document
        decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    aux_hidden = torch.cat([states[i][0] for i in aux_layers], dim=-1)
    return Captured(aux_hidden, states[len(decoder.layers)][0])


def _positions(input_ids: Tensor, document_lengths: Sequence[int] | None) -> Tensor:
    batch, num_tokens = input_ids.shape
    lengths = [num_tokens] if document_lengths is None else list(document_lengths)
    if batch != 1 or min(lengths, default=0) < 1 or sum(lengths) != num_tokens:
        raise ValueError(f"documents of {lengths} tokens do not fill input_ids of shape {tuple(input_ids.shape)}")
    return torch.cat([torch.arange(length, device=input_ids.device) for length in lengths])[None]


@contextmanager
def _recording(layers: nn.ModuleList, aux_layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Fills a dict while the layers run: i -> the state entering layer i, len(layers) -> the one leaving the last."""
    states: dict[int, Tensor] = {}

    def keep_input(index: int):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            states[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    def keep_output(module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        states[len(layers)] = output[0] if isinstance(output, tuple) else output

    handles = [layers[i].register_forward_pre_hook(keep_input(i), with_kwargs=True) for i in aux_layers]
    handles.append(layers[-1].register_forward_hook(keep_output))
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _read_tensor(folder: Path, name: str) -> Tensor:
    index = folder / INDEX_FILE
    filename = json.loads(index.read_text())["weight_map"].get(name) if index.is_file() else "model.safetensors"
    if filename is not None:
        with safe_open(folder / filename, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118  safe_open is no mapping
                return _require_float(file.get_tensor(name), name)
    raise ConfigError("target.model", f"{folder} has no tensor {name}", "use a target in Llama's layout of names")


def _require_float(tensor: Tensor, name: str) -> Tensor:
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        fix = "use the unquantised target, or one whose norm, embedding and lm_head are not quantised"
        raise ConfigError("target.model", f"{name} is stored as {tensor.dtype}", fix)
    return tensor
