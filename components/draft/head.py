"""The P-EAGLE draft head; its parameter names are those of vLLM's plain layout (vllm/.../llama_eagle3.py).

Legend: N depth-0 rows, R rows of any kind, H hidden size, T target hidden size, A aux layers, V target
vocabulary, U draft vocabulary, Q query heads, G key heads, D head dimension.
"""

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from components.draft.batch import PackedBatch
from components.draft.elementwise import Norm
from components.draft.embedding import TrainedRowsEmbedding
from components.draft.head_config import HeadConfig
from components.draft.mlp import gated_mlp
from components.draft.passes import Prefix, prefix_pass
from components.draft.products import Projection, project_together


class DraftAttention(nn.Module):
    """Projections of one layer; layer 0 reads [embedding ; feature], twice the width."""

    def __init__(self, config: HeadConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = Projection(input_size, config.num_heads * config.head_dim)
        self.k_proj = Projection(input_size, config.num_kv_heads * config.head_dim)
        self.v_proj = Projection(input_size, config.num_kv_heads * config.head_dim)
        self.o_proj = Projection(config.num_heads * config.head_dim, config.hidden_size)

    def project(self, x_RX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [R, Q, D], k [R, G, D] and v [R, G, D], not yet turned by the rotary embedding."""
        projected = project_together(x_RX, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)
        return q, k, v


class DraftMLP(nn.Module):
    """Gated SiLU, as in Llama."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = Projection(config.hidden_size, config.intermediate_size)
        self.up_proj = Projection(config.hidden_size, config.intermediate_size)
        self.down_proj = Projection(config.intermediate_size, config.hidden_size)

    def forward(self, x_RH: Tensor) -> Tensor:
        return gated_mlp(x_RH, self.gate_proj, self.up_proj, self.down_proj)


class DraftLayer(nn.Module):
    """A Llama decoder layer; layer 0 also norms the feature half of its input (`hidden_norm`)."""

    def __init__(self, config: HeadConfig, index: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.input_layernorm = Norm(width, config.rms_norm_eps)
        if index == 0:
            self.hidden_norm = Norm(width, config.rms_norm_eps)
        self.self_attn = DraftAttention(config, 2 * width if index == 0 else width)
        self.post_attention_layernorm = Norm(width, config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def project_sum(self, residual_RH: Tensor, update_RH: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Their sum, the residual stream that enters this layer, and its q, k and v."""
        residual_RH, normed_RH = self.input_layernorm.of_sum(residual_RH, update_RH)
        return residual_RH, *self.self_attn.project(normed_RH)

    def finish(self, attended_RQD: Tensor, residual_RH: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream with the output projection added, and what the MLP will add to it."""
        update_RH = self.self_attn.o_proj(attended_RQD.flatten(1))
        residual_RH, normed_RH = self.post_attention_layernorm.of_sum(residual_RH, update_RH)
        return residual_RH, self.mlp(normed_RH)


class DraftHead(nn.Module):
    """Parameters and buffers of a head; `components.draft.passes` computes with them.

    `state_dict()` has exactly the tensors of vLLM's plain layout. `d2t` [U] holds target id - draft id and
    `t2d` [V] is True where a target id can be drafted; neither exists when the draft vocabulary is the whole one.
    """

    def __init__(self, config: HeadConfig, draft_vocab_U: Tensor | None = None) -> None:
        """Random parameters.

        Args:
            config: shape of the head.
            draft_vocab_U: [U] distinct target ids, in draft id order; needed when U < V.

        Raises:
            ValueError: `draft_vocab_U` is missing, not needed, or not U distinct ids below V.
        """
        super().__init__()
        self.config = config
        aux_size = config.num_aux_layers * config.target_hidden_size
        self.embed_tokens = TrainedRowsEmbedding(config.vocab_size, config.hidden_size)
        self.fc = Projection(aux_size, config.hidden_size)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, aux_size))
        self.layers = nn.ModuleList(DraftLayer(config, index) for index in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Projection(config.hidden_size, config.draft_vocab_size)
        self.rotary = LlamaRotaryEmbedding(config.to_llama())
        self._register_vocabulary(draft_vocab_U)

    def forward(self, batch: PackedBatch, recompute: bool = False) -> Prefix:
        """The prefix pass. What wraps a module's forward (FSDP) thereby sees each training step once."""
        return prefix_pass(self, batch, recompute)

    @property
    def target_ids_U(self) -> Tensor:
        """[U] the target id of each draft id."""
        ids_U = torch.arange(self.config.draft_vocab_size, device=self.lm_head.weight.device)
        return ids_U if self.d2t is None else ids_U + self.d2t

    def draft_ids(self, target_ids: Tensor) -> Tensor:
        """The draft id of each target id, -1 for ids outside the draft vocabulary; any shape."""
        table_V = torch.full((self.config.vocab_size,), -1, device=target_ids.device)
        table_V[self.target_ids_U] = torch.arange(self.config.draft_vocab_size, device=target_ids.device)
        return table_V[target_ids]

    def rope(self, position_R: Tensor) -> tuple[Tensor, Tensor]:
        """cos, and sin with the signs that `rotate` wants, [R, 1, D] each, at least fp32."""
        dtype = torch.promote_types(self.fc.weight.dtype, torch.float32)
        cos_1RD, sin_1RD = self.rotary(position_R.new_empty((), dtype=dtype), position_R[None])
        first, second = sin_1RD[0, :, None].chunk(2, dim=-1)
        return cos_1RD[0, :, None], torch.cat([-first, second], dim=-1)

    def layer_inputs(self, next_ids_N: Tensor, aux_NX: Tensor) -> tuple[Tensor, Tensor]:
        """Layer 0's input [N, 2H] and the residual stream [N, H] it starts from (the un-normed fc output)."""
        first = self.layers[0]
        # Under autocast fc answers in bf16; the residual stream stays in the parameters' dtype.
        residual_NH = self.fc(aux_NX).to(self.fc.weight.dtype)
        embed_NH = first.input_layernorm(self.embed_tokens(next_ids_N))
        return torch.cat([embed_NH, first.hidden_norm(residual_NH)], dim=-1), residual_NH

    @torch.no_grad()
    def init_from_target(
        self, embed_VH: Tensor, lm_head_VH: Tensor, norm_H: Tensor, feature_rms_A: Tensor, seed: int = 0
    ) -> None:
        """Starts from the target: its embeddings, its final norm and the draft vocabulary's rows of its lm_head.

        fc and mask_hidden are random at the scale of typical features, so that fc's output is of order 1. The norm
        is shrunk until logits are of order 1: with the target's own norm a head that knows nothing is as sure as
        its target, and unlearning that took most of a first epoch (SmolLM2: loss 20 instead of 9 at the start).

        Args:
            embed_VH: [V, H] the target's input embeddings.
            lm_head_VH: [V, H] the target's output embeddings (the same tensor when tied).
            norm_H: [H] weight of the target's final norm.
            feature_rms_A: [A] typical root mean square of each aux layer's rows (`median_feature_rms`).
            seed: of the random parameters.

        Raises:
            ValueError: the head is not as wide as its target, so that nothing can be copied.
        """
        config = self.config
        if config.hidden_size != config.target_hidden_size:
            raise ValueError(f"hidden_size: must equal the target's {config.target_hidden_size} to copy its rows")
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            _init_layer(layer, config.num_layers, generator)
        rms_X = feature_rms_A.float().repeat_interleave(config.target_hidden_size)
        self.fc.weight.copy_(_scaled_normal(self.fc.weight, generator) / rms_X.to(self.fc.weight.device))
        noise_X = torch.randn(rms_X.shape, generator=generator)
        self.mask_hidden.copy_(noise_X.to(rms_X.device) * rms_X)
        self.embed_tokens.weight.copy_(embed_VH)
        self.lm_head.weight.copy_(lm_head_VH[self.target_ids_U.to(lm_head_VH.device)])
        self.norm.weight.copy_(norm_H)
        self.norm.weight /= (self.lm_head.weight * self.norm.weight).pow(2).sum(1).mean().sqrt()

    def _register_vocabulary(self, draft_vocab_U: Tensor | None) -> None:
        size, vocab_size = self.config.draft_vocab_size, self.config.vocab_size
        self.d2t: Tensor | None
        self.t2d: Tensor | None
        if size == vocab_size:
            if draft_vocab_U is not None and not torch.equal(draft_vocab_U.cpu(), torch.arange(size)):
                raise ValueError("draft_vocab_U: a head with the whole vocabulary has no map")
            self.d2t = self.t2d = None
            return
        if draft_vocab_U is None:
            raise ValueError(f"draft_vocab_U: needed, {size} of {vocab_size} ids can be drafted")
        if draft_vocab_U.shape != (size,) or draft_vocab_U.unique().numel() != size:
            raise ValueError(f"draft_vocab_U: expected {size} distinct ids, got shape {tuple(draft_vocab_U.shape)}")
        if draft_vocab_U.min() < 0 or draft_vocab_U.max() >= vocab_size:
            raise ValueError(f"draft_vocab_U: ids must lie in [0, {vocab_size})")
        can_draft_V = torch.zeros(vocab_size, dtype=torch.bool)
        can_draft_V[draft_vocab_U.long()] = True
        self.register_buffer("d2t", draft_vocab_U.long() - torch.arange(size))
        self.register_buffer("t2d", can_draft_V)


def median_feature_rms(aux_NX: Tensor, num_aux_layers: int) -> Tensor:
    """[A] median over tokens of the root mean square of each aux layer's row.

    The median, because the first token's features are hundreds of times larger than the others.
    """
    return feature_rms(aux_NX, num_aux_layers).median(dim=0).values


def feature_rms(aux_NX: Tensor, num_aux_layers: int) -> Tensor:
    """[N, A] root mean square of each aux layer's row."""
    return aux_NX.float().unflatten(-1, (num_aux_layers, -1)).pow(2).mean(-1).sqrt()


def _init_layer(layer: DraftLayer, num_layers: int, generator: torch.Generator) -> None:
    """Unit-variance products; what is added to the residual stream shrinks with the number of additions."""
    for name, weight in layer.named_parameters():
        if weight.dim() == 1:
            weight.fill_(1.0)
            continue
        shrink = (2 * num_layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        weight.copy_(_scaled_normal(weight, generator) * shrink)


def _scaled_normal(weight_OI: Tensor, generator: torch.Generator) -> Tensor:
    noise_OI = torch.randn(weight_OI.shape, generator=generator)
    return (noise_OI * weight_OI.shape[1] ** -0.5).to(weight_OI.device)
