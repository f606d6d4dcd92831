"""The shape of a draft head and what it must repeat of its target."""

from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, PretrainedConfig


@dataclass(frozen=True)
class HeadConfig:
    """Shape of a head and the facts about its target that the server must repeat."""

    hidden_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    """Ids i of the residual streams *entering* target decoder layer i."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    """As in the target's config: rope_type, rope_theta and whatever its scaling needs."""

    max_position_embeddings: int
    mask_token_id: int
    """Input token of every depth above 0; no text may use it."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads: {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size: {self.draft_vocab_size} is not in [1, {self.vocab_size}]")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id: {self.mask_token_id} is not in [0, {self.vocab_size})")
        if not self.aux_layers or self.num_layers < 1:
            raise ValueError("aux_layers, num_layers: a head needs at least one of each")

    @property
    def num_aux_layers(self) -> int:
        return len(self.aux_layers)

    @classmethod
    def from_target(
        cls,
        target: PretrainedConfig,
        *,
        aux_layers: tuple[int, ...],
        num_layers: int,
        draft_vocab_size: int,
        mask_token_id: int,
    ) -> "HeadConfig":
        """A head of the target's own width, heads and rotary settings."""
        return cls(
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            aux_layers=tuple(aux_layers),
            num_layers=num_layers,
            num_heads=target.num_attention_heads,
            num_kv_heads=target.num_key_value_heads,
            head_dim=getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
            intermediate_size=target.intermediate_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            rms_norm_eps=target.rms_norm_eps,
            rope_parameters=dict(target.rope_parameters),
            max_position_embeddings=target.max_position_embeddings,
            mask_token_id=mask_token_id,
        )

    def to_llama(self) -> LlamaConfig:
        """The Llama config of the head's decoder layers."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters=dict(self.rope_parameters),
            max_position_embeddings=self.max_position_embeddings,
            tie_word_embeddings=False,
        )
