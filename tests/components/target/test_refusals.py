"""Which targets are refused, from config.json alone; and that those which are accepted can be recorded."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from components.section import ConfigError
from components.target.layers import capture, load_target, teacher_weights
from components.target.refusals import ACCEPTED, NOT_RECORDED, RULES, find_refusal
from components.target.resolve import resolve_target

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
ROUNDING = 1e-5
"""Of float32 sums of a few hundred terms of order 1, in another order."""


def config_of(**fields: Any) -> dict[str, Any]:
    return LLAMA | fields


REFUSED = [
    ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "encoder-decoder"),
    ({"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}, "encoder-decoder"),
    ({"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}, "multimodal"),
    ({"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}, "multimodal"),
    ({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}, "multimodal"),
    ({"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}, "multimodal"),
    ({"architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "qwen2_audio"}, "multimodal"),
    (
        config_of(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}),
        "M-RoPE positions",
    ),
    ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "recurrent"),
    ({"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2"}, "recurrent"),
    ({"architectures": ["JambaForCausalLM"], "model_type": "jamba"}, "recurrent"),
    ({"architectures": ["BambaForCausalLM"], "model_type": "bamba"}, "recurrent"),
    ({"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h"}, "recurrent"),
    ({"architectures": ["Zamba2ForCausalLM"], "model_type": "zamba2"}, "recurrent"),
    ({"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"}, "recurrent"),
    ({"architectures": ["RecurrentGemmaForCausalLM"], "model_type": "recurrent_gemma"}, "recurrent"),
    ({"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}, "recurrent"),
    ({"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2"}, "recurrent"),
    (config_of(quantization_config={"quant_method": "awq", "bits": 4}), "quantised"),
    (config_of(quantization_config={"quant_method": "gptq", "bits": 4}), "quantised"),
    (config_of(quantization_config={"quant_method": "fp8"}), "quantised"),
    (config_of(quantization_config={"quant_method": "compressed-tensors", "format": "int-quantized"}), "quantised"),
    ({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}, "GptOssForCausalLM"),
    ({"architectures": ["AfmoeForCausalLM"], "model_type": "afmoe"}, "AfmoeForCausalLM"),
    ({"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}, "Llama4ForCausalLM"),
    ({"architectures": ["CLIPModel"], "model_type": "clip_text_model"}, "unknown to transformers"),
    ({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}, "scaled or capped logits"),
    ({"architectures": ["CohereForCausalLM"], "model_type": "cohere"}, "scaled or capped logits"),
    ({"architectures": ["GraniteForCausalLM"], "model_type": "granite", "logits_scaling": 8.0}, "scaled or capped"),
    ({"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash"}, "rotary settings that differ"),
    (
        {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.75},
        "rotary embedding of a",
    ),
    ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "any other architecture"),
    ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}, "any other architecture"),
    ({"model_type": "llama"}, "any other architecture"),
]


@pytest.mark.parametrize(("fields", "kind"), REFUSED, ids=[f"{f.get('architectures')}-{k}" for f, k in REFUSED])
def test_a_target_is_refused_from_its_config_alone(tmp_path: Path, fields: dict[str, Any], kind: str) -> None:
    """The folder has no tokenizer, and no weights that could be read."""
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    refusal = find_refusal(AutoConfig.from_pretrained(tmp_path))
    assert refusal is not None
    assert refusal.kind.startswith(kind)
    with pytest.raises(ConfigError) as error:
        resolve_target(str(tmp_path), None, tmp_path)
    assert (error.value.path, error.value.problem, error.value.fix) == ("target.model", refusal.reason, refusal.fix)


def test_every_rule_is_tested() -> None:
    assert [rule.kind for rule in RULES if not any(rule.kind.startswith(kind) for _, kind in REFUSED)] == []


@pytest.mark.parametrize(
    "fields",
    [
        config_of(),
        config_of(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 8192}),
        {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096},
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
        {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": 2047},
        {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "logits_scaling": 1.0},
    ],
    ids=lambda fields: f"{fields['architectures'][0]}-{len(fields)}",
)  # fmt: skip
def test_a_target_is_accepted_from_its_config_alone(tmp_path: Path, fields: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert find_refusal(AutoConfig.from_pretrained(tmp_path)) is None


def tiny_model(architecture: str) -> PreTrainedModel:
    """A random model of the architecture, with whatever windows, experts and latent attention its kind can have."""
    types = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if isinstance(name, str)}
    heads = 4 if "Deepseek" in architecture else 2
    config = CONFIG_MAPPING[types[architecture]](
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=heads,
        head_dim=16, vocab_size=128, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        sliding_window=4, use_sliding_window=True, max_window_layers=2,
        num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1,
        kv_lora_rank=16, q_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5)
    return model


def leak(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """How much the last states of the second of two packed documents differ from those that it has alone."""
    packed = capture(model, ids, [1, 2, 3], [12, 8])
    alone = capture(model, ids[:, 12:], [1, 2, 3])
    pairs = ((packed.last_hidden, alone.last_hidden), (packed.aux_hidden, alone.aux_hidden))
    return max(float((a[12:] - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("architecture", ACCEPTED)
def test_what_is_recorded_of_an_accepted_target_is_right(architecture: str, tmp_path: Path) -> None:
    tiny_model(architecture).save_pretrained(tmp_path)
    model, teacher = load_target(tmp_path, torch.float32), teacher_weights(tmp_path)
    assert model.config.architectures == [architecture]
    ids = torch.randint(3, 128, (1, 20), generator=torch.Generator().manual_seed(1))
    assert leak(model, ids) < ROUNDING
    hidden = capture(model, ids, [1]).last_hidden
    normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + teacher.eps) * teacher.norm_H
    logits = model(input_ids=ids, use_cache=False).logits[0]
    assert torch.allclose(normed @ teacher.lm_head_VH.T, logits, rtol=0, atol=ROUNDING * float(logits.abs().max()))


@pytest.mark.parametrize("architecture", ["AfmoeForCausalLM", "GptOssForCausalLM"])
def test_packed_documents_see_each_other_in_what_is_not_recorded(architecture: str) -> None:
    """When this fails, transformers has mended the model and the table may be too."""
    ids = torch.randint(3, 128, (1, 20), generator=torch.Generator().manual_seed(1))
    assert leak(tiny_model(architecture), ids) > 100 * ROUNDING


@pytest.mark.parametrize("architecture", sorted({*ACCEPTED, *NOT_RECORDED}))
def test_vllm_hands_its_hidden_states_to_draft_heads(architecture: str) -> None:
    """Read from vLLM's sources: to import the classes takes a minute."""
    module, name = re.findall(
        rf'^    "{architecture}": \(\s*"(\w+)",\s*"(\w+)",?\s*\)', _source("registry"), re.MULTILINE
    )[0]
    source = _source(module) + _source("llama")  # some derive from Llama's class
    bases = ""
    while name and "SupportsEagle3" not in bases:
        bases = re.findall(rf"^class {name}\(([^)]*)\):", source, re.MULTILINE)[0]
        name = bases.split(",")[0].strip() if "nn.Module" not in bases else ""
    assert "SupportsEagle3" in bases


def _source(module: str) -> str:
    spec = find_spec("vllm")
    assert spec is not None
    return (Path(spec.origin or "").parent / "model_executor" / "models" / f"{module}.py").read_text()
