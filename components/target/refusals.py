"""Which targets cannot be given a head, and why: found out from config.json, before anything is downloaded or started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from components.target.vllm_versions import TESTED_VLLM

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Text models of vLLM 0.32.0 whose class implements SupportsEagle3 (vllm/model_executor/models/interfaces.py):
# only these hand their hidden states to a draft head.
EAGLE3_ARCHITECTURES = frozenset(
    {
        "AfmoeForCausalLM",
        "ApertusForCausalLM",
        "Cohere2MoeForCausalLM",
        "DeepseekForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Ernie4_5ForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "InternLM3ForCausalLM",
        "Llama4ForCausalLM",
        "LlamaForCausalLM",
        "MiMoForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiniCPMForCausalLM",
        "MiniCPM3ForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Ministral3ForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Plamo3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
MULTIMODAL_KEYS = ("vision_config", "audio_config", "thinker_config", "image_token_id", "audio_token_id")
LOGIT_SCALE_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "dim_model_base")
RECURRENT_LAYER_TYPES = ("linear_attention", "mamba", "mamba2", "recurrent", "conv")


def refusal_reason(config: PreTrainedConfig) -> str | None:
    """Why no head can be trained for this target and served with it, or None when one can.

    Args:
        config: The target's configuration as transformers read it.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields = config.to_dict()
    architecture = (config.architectures or ["no architecture"])[0]
    if config.is_encoder_decoder:
        return f"{architecture} is an encoder-decoder: it has no single causal stream to draft from"
    if any(fields.get(key) is not None for key in MULTIMODAL_KEYS):
        return f"{architecture} is multimodal: a head of text ids cannot draft after images or audio"
    if _has_mrope(fields):
        return f"{architecture} uses M-RoPE positions, which vLLM refuses for draft heads"
    if any(kind in RECURRENT_LAYER_TYPES for kind in fields.get("layer_types") or ()):
        return f"{architecture} has recurrent layers: documents packed into one pass would leak into each other"
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"transformers has no causal language model for model type {config.model_type!r}"
    if any(fields.get(key) not in (None, 1, 1.0) for key in LOGIT_SCALE_KEYS):
        return f"{architecture} scales or caps its logits: the teacher is lm_head(norm(hidden)) and nothing else"
    if architecture not in EAGLE3_ARCHITECTURES:
        return f"vLLM {TESTED_VLLM} gives no hidden states of {architecture} to draft heads"
    if fields.get("rms_norm_eps") is None:
        return f"{architecture} does not end in an RMSNorm"
    return None


def _has_mrope(fields: dict[str, Any]) -> bool:
    rope = fields.get("rope_parameters") or {}
    return any("mrope" in key for key in rope)
