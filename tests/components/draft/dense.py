"""The flat N x K computation of design.md section 5, written from its text alone.

Every element (a, d) of a document is a row of one dense attention with the predicate as a mask, in fp64. It
shares no code with the passes, the chains, the losses or the schedule, and is slow on purpose.
"""

import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from components.draft.batch import Document
from components.draft.head import DraftHead, HeadConfig
from components.draft.losses import Teacher


def tiny_config(**changes: object) -> HeadConfig:
    """Two layers, four query heads on two key heads, an odd draft vocabulary."""
    fields = {
        "hidden_size": 32,
        "target_hidden_size": 32,
        "aux_layers": (0, 1, 2),
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 61,
        "draft_vocab_size": 43,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "max_position_embeddings": 128,
        "mask_token_id": 60,
    }
    return HeadConfig(**(fields | changes))


def tiny_head(config: HeadConfig | None = None, seed: int = 0) -> DraftHead:
    config = config or tiny_config()
    torch.manual_seed(seed)
    vocabulary = torch.randperm(config.vocab_size)[: config.draft_vocab_size]
    head = DraftHead(config, vocabulary if config.draft_vocab_size < config.vocab_size else None).double()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(0.5 + torch.rand_like(parameter))
    return head


def tiny_teacher(config: HeadConfig, seed: int = 1) -> Teacher:
    generator = torch.Generator().manual_seed(seed)
    norm = 0.5 + torch.rand(config.target_hidden_size, generator=generator, dtype=torch.float64)
    rows = torch.randn(config.draft_vocab_size, config.target_hidden_size, generator=generator, dtype=torch.float64)
    return Teacher(norm, 1e-5, rows * 0.3)


def tiny_document(config: HeadConfig, num_tokens: int, answers: list[tuple[int, int]], seed: int) -> Document:
    """Random tokens and features; the first token's features are huge, as real ones are."""
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(
        num_tokens, config.num_aux_layers * config.target_hidden_size, generator=generator, dtype=torch.float64
    )
    aux[0] *= 100
    mask = torch.zeros(num_tokens, dtype=torch.bool)
    for start, end in answers:
        mask[start:end] = True
    return Document(
        torch.randint(0, config.mask_token_id, (num_tokens,), generator=generator),
        mask,
        aux,
        torch.randn(num_tokens, config.target_hidden_size, generator=generator, dtype=torch.float64),
    )


def supervised(document: Document, num_depths: int) -> Iterator[tuple[int, int]]:
    """(a, d) with x_{a+1} and x_{a+d+2} in the same answer, by going through every pair."""
    mask = document.loss_mask.tolist()
    for a, d in itertools.product(range(len(mask) - 1), range(num_depths)):
        if a + d + 2 < len(mask) and all(mask[a + 1 : a + d + 3]):
            yield a, d


def dense_loss(
    head: DraftHead,
    document: Document,
    lengths: Mapping[int, int],
    teacher: Teacher,
    num_depths: int,
    kind: str = "kl",
) -> Tensor:
    """Sum of the losses of the elements (a, d) with d <= lengths[a], one document."""
    parameters = dict(head.named_parameters())
    elements = list(itertools.product(range(len(document.input_ids) - 1), range(num_depths)))
    hidden = dense_hidden(head.config, parameters, document, elements)
    student = _norm(hidden, parameters["norm.weight"], head.config) @ parameters["lm_head.weight"].T
    ids = head.target_ids_U.tolist()
    total = hidden.new_zeros(())
    for row, (a, d) in enumerate(elements):
        if d > lengths.get(a, -1):
            continue
        log_q = student[row].log_softmax(-1)
        if kind == "cross_entropy":
            target = int(document.input_ids[a + d + 2])
            total = total - (log_q[ids.index(target)] if target in ids else 0.0)
            continue
        state = document.last_hidden[a + d + 1].double()
        state = state / (state.pow(2).mean() + teacher.norm_eps).sqrt() * teacher.norm_T
        p = (teacher.lm_head_UT @ state).softmax(-1)
        total = total + (p * (p.log() - log_q)).sum()
    return total


def dense_hidden(
    config: HeadConfig, parameters: Mapping[str, Tensor], document: Document, elements: list[tuple[int, int]]
) -> Tensor:
    """[elements, H] residual stream of every element before the final norm."""
    anchor = torch.tensor([a for a, _ in elements])
    depth = torch.tensor([d for _, d in elements])
    at_zero = (depth == 0)[:, None]
    tokens = torch.where(depth == 0, document.input_ids[anchor + 1], config.mask_token_id)
    aux = torch.where(at_zero, document.aux_hidden[anchor].double(), parameters["mask_hidden"].view(1, -1))
    # (a_q, d_q) sees (a_k, d_k) iff (d_k = 0 and a_k <= a_q) or (a_k = a_q and d_k <= d_q)
    sees = ((depth[None] == 0) & (anchor[None] <= anchor[:, None])) | (
        (anchor[None] == anchor[:, None]) & (depth[None] <= depth[:, None])
    )
    embedded = _norm(parameters["embed_tokens.weight"][tokens], parameters["layers.0.input_layernorm.weight"], config)
    residual = aux @ parameters["fc.weight"].T
    for index in range(config.num_layers):
        name = f"layers.{index}."
        if index == 0:
            x = torch.cat([embedded, _norm(residual, parameters[name + "hidden_norm.weight"], config)], -1)
        else:
            x = _norm(residual, parameters[name + "input_layernorm.weight"], config)
        q, k, v = (x @ parameters[f"{name}self_attn.{p}_proj.weight"].T for p in "qkv")
        q, k, v = (y.view(len(elements), -1, config.head_dim) for y in (q, k, v))
        group = config.num_heads // config.num_kv_heads
        q, k = _rope(q, anchor + depth, config), _rope(k, anchor + depth, config)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / config.head_dim**0.5
        probs = scores.masked_fill(~sees, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", probs, v).flatten(1)
        residual = residual + mixed @ parameters[name + "self_attn.o_proj.weight"].T
        y = _norm(residual, parameters[name + "post_attention_layernorm.weight"], config)
        gate = y @ parameters[name + "mlp.gate_proj.weight"].T
        up = y @ parameters[name + "mlp.up_proj.weight"].T
        residual = residual + (gate * gate.sigmoid() * up) @ parameters[name + "mlp.down_proj.weight"].T
    return residual


def _norm(x: Tensor, weight: Tensor, config: HeadConfig) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight


def _rope(x: Tensor, position: Tensor, config: HeadConfig) -> Tensor:
    """Angles in fp32, as every implementation has them, in the order that rounds like theirs."""
    half = config.head_dim // 2
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angle = position[:, None].float() * (1.0 / config.rope_parameters["rope_theta"] ** exponent)
    cos, sin = angle.cos().double()[:, None], angle.sin().double()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
