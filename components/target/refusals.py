"""Which targets can be given a head, and why the others cannot: found out from config.json, before weights are touched.

`ACCEPTED` and `RULES` are the tables of docs/targets.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from components.target.vllm_versions import TESTED_VLLM

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Text models whose class in vLLM 0.32.0 implements SupportsEagle3 (vllm/model_executor/models), so that they hand their
# hidden states to a draft head, and of which transformers' twin was compared in the tests: packed documents do not see each
# other, and lm_head(norm(hidden)) is the logits.
ACCEPTED = {
    "ApertusForCausalLM": "dense",
    "DeepseekV2ForCausalLM": "mixture of experts, latent attention (MLA)",
    "DeepseekV3ForCausalLM": "mixture of experts, latent attention (MLA)",
    "Ernie4_5ForCausalLM": "dense",
    "GraniteForCausalLM": "dense",
    "LlamaForCausalLM": "dense",
    "MiniMaxM2ForCausalLM": "mixture of experts",
    "Ministral3ForCausalLM": "dense",
    "MistralForCausalLM": "dense, with or without sliding window",
    "Phi3ForCausalLM": "dense, with or without sliding window",
    "Qwen2ForCausalLM": "dense, with or without sliding window",
    "Qwen3ForCausalLM": "dense",
    "Qwen3MoeForCausalLM": "mixture of experts",
}
# vLLM would draft for these too, but their hidden states cannot be recorded.
NOT_RECORDED = {
    "AfmoeForCausalLM": "transformers' model lets documents packed into one pass see each other",
    "GptOssForCausalLM": "transformers' model lets documents packed into one pass see each other, and vLLM's chat "
    "endpoint writes its prompts in Harmony, not with the chat template",
    "Llama4ForCausalLM": "transformers' model has no list of decoder layers where the others have it",
}
MULTIMODAL_KEYS = ("vision_config", "audio_config", "thinker_config", "image_token_id", "audio_token_id")
RECURRENT_KEYS = ("mamba_d_state", "ssm_state_size", "state_size", "lru_width", "conv_L_cache")
RECURRENT_LAYER_TYPES = ("linear_attention", "mamba", "mamba2", "recurrent", "conv")
LOGIT_SCALE_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "dim_model_base")
OTHER_TARGET = "choose a text-only causal model that vLLM drafts for (docs/targets.md)"


@dataclass(frozen=True)
class Facts:
    """What the rules look at."""

    config: PreTrainedConfig
    fields: Mapping[str, Any]
    """The configuration as transformers read it, defaults filled in."""

    @property
    def architecture(self) -> str:
        return (self.config.architectures or ["no architecture"])[0]

    @property
    def rope(self) -> Mapping[str, Any]:
        return self.fields.get("rope_parameters") or {}

    def has(self, *keys: str) -> bool:
        return any(self.fields.get(key) is not None for key in keys)


@dataclass(frozen=True)
class Rule:
    """A kind of target that is refused."""

    kind: str
    sign: str
    """What in config.json shows it."""
    applies: Callable[[Facts], bool]
    reason: str
    """The end of the sentence "<architecture> ..."."""
    fix: str = OTHER_TARGET


@dataclass(frozen=True)
class Refusal:
    kind: str
    reason: str
    fix: str


def _cannot_be_recorded(architecture: str, why: str) -> Rule:
    reason = f"is drafted for by vLLM, but its hidden states cannot be recorded: {why}"
    return Rule(architecture, "`architectures`", lambda facts: facts.architecture == architecture, reason)


RULES = (
    Rule(
        "encoder-decoder",
        "`is_encoder_decoder`",
        lambda facts: bool(facts.config.is_encoder_decoder),
        "is an encoder-decoder: it has no single causal stream to draft from",
    ),
    Rule(
        "multimodal",
        ", ".join(f"`{key}`" for key in MULTIMODAL_KEYS),
        lambda facts: facts.has(*MULTIMODAL_KEYS),
        "is multimodal: a head of text ids cannot draft after images or audio",
    ),
    Rule(
        "M-RoPE positions",
        "`mrope_section` in `rope_parameters`",
        lambda facts: any("mrope" in key for key in facts.rope),
        "uses M-RoPE positions, which vLLM refuses for draft heads",
    ),
    Rule(
        "recurrent (Mamba, linear attention, convolution) and hybrids with it",
        f"{', '.join(f'`{key}`' for key in RECURRENT_KEYS)}, or such `layer_types`",
        lambda facts: facts.has(*RECURRENT_KEYS) or _has_recurrent_layers(facts),
        "has recurrent layers: documents packed into one pass would leak into each other",
    ),
    Rule(
        "quantised",
        "`quantization_config`, `compression_config`",
        lambda facts: facts.has("quantization_config", "compression_config"),
        "is stored quantised: transformers, which records the hidden states, does not load such weights with the "
        "packages of the lock files",
        "train on the unquantised model that it was made from",
    ),
    Rule(
        "unknown to transformers as a causal language model",
        "`model_type`",
        lambda facts: not _is_causal_lm(facts.config.model_type),
        "has a model type of which transformers has no causal language model",
    ),
    Rule(
        "scaled or capped logits",
        ", ".join(f"`{key}`" for key in LOGIT_SCALE_KEYS),
        lambda facts: any(facts.fields.get(key) not in (None, 1, 1.0) for key in LOGIT_SCALE_KEYS),
        "scales or caps its logits: the teacher is lm_head(norm(hidden)) and nothing else",
    ),
    Rule(
        "rotary settings that differ from layer to layer",
        "`rope_parameters` by layer type",
        lambda facts: any(isinstance(value, Mapping) for value in facts.rope.values()),
        "has rotary settings of its own for each type of layer; a head has one",
    ),
    Rule(
        "rotary embedding of a part of each head",
        "`partial_rotary_factor` below 1",
        lambda facts: facts.rope.get("partial_rotary_factor", 1.0) != 1.0,
        "turns a part of each attention head only; a head of this project turns all of it",
    ),
    *(_cannot_be_recorded(architecture, why) for architecture, why in NOT_RECORDED.items()),
    Rule(
        "any other architecture",
        "`architectures`",
        lambda facts: facts.architecture not in ACCEPTED,
        f"is none of the targets of which vLLM {TESTED_VLLM} hands hidden states to draft heads and which the tests compared",
    ),
)
"""In this order: the first that applies is the one that is named."""


def find_refusal(config: PreTrainedConfig) -> Refusal | None:
    """Why no head can be trained for this target and served with it, or None when one can.

    Args:
        config: The target's configuration as transformers read it.
    """
    facts = Facts(config, config.to_dict())
    for rule in RULES:
        if rule.applies(facts):
            return Refusal(rule.kind, f"{facts.architecture} {rule.reason}", rule.fix)
    return None


def _has_recurrent_layers(facts: Facts) -> bool:
    return any(kind in RECURRENT_LAYER_TYPES for kind in facts.fields.get("layer_types") or ())


def _is_causal_lm(model_type: str) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
