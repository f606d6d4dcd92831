"""Tiny random drafts of every kind that vLLM loads: an EAGLE head, a target with layers that predict further tokens (MTP), a PARD draft."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from tests.tiny import BOS, EOS, PAD, make_tokenizer

WEIGHTS = "model.safetensors"


def make_tiny_eagle(path: Path, target: Path, seed: int = 0) -> Path:
    """An EAGLE-1 head of the Llama at `target`: one decoder layer over [embedding ; the target's last hidden state].

    vLLM shares the target's embedding and output layer with it (vllm/model_executor/models/llama_eagle.py).
    """
    config = json.loads((target / "config.json").read_text())
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    queries, keys = heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (queries, hidden),
        "layers.0.self_attn.k_proj": (keys, hidden),
        "layers.0.self_attn.v_proj": (keys, hidden),
        "layers.0.self_attn.o_proj": (hidden, queries),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"{name}.weight": _matrix(shape, generator) for name, shape in shapes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    return path


def make_tiny_mtp(path: Path, seed: int = 0) -> Path:
    """A mixture of experts whose checkpoint ends with one layer that predicts the token after the next.

    Its tensors are those of vllm/model_executor/models/glm4_moe_mtp.py; the decoder layer inside is a copy of the last one.
    """
    torch.manual_seed(seed)
    config = Glm4MoeConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, num_nextn_predict_layers=1, max_position_embeddings=512, use_qk_norm=False,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, initializer_range=0.2,
    )  # fmt: skip
    Glm4MoeForCausalLM(config).save_pretrained(path)
    make_tokenizer(320).save_pretrained(path)
    tensors, last = load_file(path / WEIGHTS), config.num_hidden_layers - 1
    extra = f"model.layers.{last + 1}"
    copied = {
        n.replace(f"layers.{last}.", f"layers.{last + 1}."): t.clone()
        for n, t in tensors.items()
        if f"layers.{last}." in n
    }
    ones = {f"{extra}.{name}.weight": torch.ones(64) for name in ("enorm", "hnorm", "shared_head.norm")}
    projection = {f"{extra}.eh_proj.weight": _matrix((64, 128), torch.Generator().manual_seed(seed))}
    shared = {
        f"{extra}.embed_tokens.weight": "model.embed_tokens.weight",
        f"{extra}.shared_head.head.weight": "lm_head.weight",
    }
    tensors |= copied | ones | projection | {name: tensors[source].clone() for name, source in shared.items()}
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    return path


def make_pard(path: Path, target: Path, mask_token: int) -> Path:
    """The target itself as a draft model that was told which token stands for those it cannot see yet."""
    shutil.copytree(target, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"pard_token": mask_token}))
    return path


def _matrix(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * shape[-1] ** -0.5
