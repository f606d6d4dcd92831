"""A head on disk, in vLLM's plain layout: `config.json` and `model.safetensors`, nothing else.

Read by vllm/model_executor/models/llama_eagle3.py (`LlamaForCausalLMEagle3`).
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.draft.head import DraftHead, HeadConfig

ARCHITECTURE = "LlamaForCausalLMEagle3"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
# vLLM assumes this many aux layers when the config does not say.
DEFAULT_NUM_AUX_LAYERS = 3


def save_head(head: DraftHead, folder: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Writes a head that vLLM serves as it is.

    Everything goes to a folder beside `folder`, which is renamed at the end: a reader sees a whole head or none.

    Args:
        head: the head.
        folder: must not exist yet.
        dtype: of the weights, the serving dtype; default is that of the parameters.

    Returns:
        The folder.

    Raises:
        ValueError: a tensor has NaN or infinite values (the message names it).
        FileExistsError: the folder exists.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists; a head is never written over another")
    tensors = _tensors(head, dtype or head.fc.weight.dtype)
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    save_file(tensors, scratch / WEIGHTS_FILE, metadata={"format": "pt"})
    config = head_config_json(head.config, tensors["fc.weight"].dtype)
    (scratch / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    scratch.rename(folder)
    return folder


def load_head(folder: str | Path) -> DraftHead:
    """Reads a head in the layout that `save_head` writes, in the dtype it was written in.

    Raises:
        ValueError: a tensor is missing (a head without its `d2t` would draft the wrong tokens), unknown, of
            another shape or not finite.
    """
    folder = Path(folder)
    config = head_config_from_json(json.loads((folder / CONFIG_FILE).read_text()))
    tensors = load_file(folder / WEIGHTS_FILE)
    for name, tensor in tensors.items():
        _check_finite(name, tensor)
    vocabulary = None
    if config.draft_vocab_size < config.vocab_size:
        if "d2t" not in tensors:
            raise ValueError(f"{folder}: d2t is missing, but only {config.draft_vocab_size} ids can be drafted")
        vocabulary = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    head = DraftHead(config, vocabulary).to(tensors["fc.weight"].dtype)
    try:
        head.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{folder}: {error}") from error
    return head


def head_config_json(config: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What vLLM needs to know about a head; the three mask token keys are read by different versions."""
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": config.rope_parameters,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "mask_token_id": config.mask_token_id,
        "ptd_token_id": config.mask_token_id,
        "pard_token": config.mask_token_id,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
    }
    if config.num_aux_layers != DEFAULT_NUM_AUX_LAYERS:
        fields["num_aux_hidden_states"] = config.num_aux_layers
    return fields


def head_config_from_json(fields: dict[str, Any]) -> HeadConfig:
    """The inverse of `head_config_json`.

    Raises:
        ValueError: the config is of another kind of head, or lacks a key.
    """
    if fields.get("architectures") != [ARCHITECTURE] or fields.get("norm_before_residual"):
        raise ValueError(
            f"expected a {ARCHITECTURE} with norm_before_residual false, got {fields.get('architectures')}"
        )
    try:
        return HeadConfig(
            hidden_size=fields["hidden_size"],
            target_hidden_size=fields["target_hidden_size"],
            aux_layers=tuple(fields["eagle_aux_hidden_state_layer_ids"]),
            num_layers=fields["num_hidden_layers"],
            num_heads=fields["num_attention_heads"],
            num_kv_heads=fields["num_key_value_heads"],
            head_dim=fields["head_dim"],
            intermediate_size=fields["intermediate_size"],
            vocab_size=fields["vocab_size"],
            draft_vocab_size=fields["draft_vocab_size"],
            rms_norm_eps=fields["rms_norm_eps"],
            rope_parameters=fields["rope_parameters"],
            max_position_embeddings=fields["max_position_embeddings"],
            mask_token_id=fields["mask_token_id"],
        )
    except KeyError as error:
        raise ValueError(f"{CONFIG_FILE}: {error.args[0]} is missing") from error


def _tensors(head: DraftHead, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in head.state_dict().items():
        tensor = tensor.detach().cpu()
        if tensor.is_floating_point():
            tensor = tensor.to(dtype)
        _check_finite(name, tensor)
        tensors[name] = tensor.contiguous()
    return tensors


def _check_finite(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise ValueError(f"{name}: has NaN or infinite values")
