"""A GGUF file of the Llama family as a plain Hugging Face folder."""

from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFReader, TokenType, dequantize, get_tensor_name_map
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write config, bf16 safetensors, tokenizer with chat template and generation config of a Llama GGUF file.

    Raises:
        ValueError: a tokenizer or tensors that this conversion does not know.
    """
    reader = GGUFReader(gguf)  # parsing the vocabulary takes seconds: once, then everything is taken from it
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _make_config(fields)
    config.save_pretrained(folder)
    save_file(_read_weights(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    _make_tokenizer(fields, config).save_pretrained(folder)
    ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(folder)


def _make_config(fields: dict[str, Any]) -> LlamaConfig:
    num_heads = fields["llama.attention.head_count"]
    return LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=num_heads,
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.embedding_length"] // num_heads,
        max_position_embeddings=fields["llama.context_length"],
        # stored in float32: 9.9999997e-06 is 1e-05
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        architectures=["LlamaForCausalLM"],
        dtype=torch.bfloat16,
    )


def _read_weights(reader: GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Every tensor of the model in bf16 under its Hugging Face name; ValueError when the file has others."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    weights = {}
    for name, shape in shapes.items():
        tensor = stored.pop(f"{names.get_name(name.removesuffix('.weight'))}.weight")
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type)).reshape(shape)
        weights[name] = _undo_rope_order(name, values, config.head_dim).to(torch.bfloat16).contiguous()
    if stored:
        raise ValueError(f"the GGUF file holds tensors that its config does not need: {sorted(stored)}")
    return weights


def _undo_rope_order(name: str, weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """GGUF interleaves the two RoPE halves of each query and key head; Hugging Face keeps one after the other."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(weight.shape)


def _make_tokenizer(fields: dict[str, Any], config: LlamaConfig) -> PreTrainedTokenizerFast:
    """The byte-level BPE that the file declares ("smollm": digits one by one, then GPT-2's pattern).

    Built from the vocabulary and merges: the general GGUF import leaves the digit rule out and guesses eos and pad.
    """
    if fields["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"unknown GGUF pre-tokenizer {fields['tokenizer.ggml.pre']!r}")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[config.bos_token_id],
        eos_token=tokens[config.eos_token_id],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[config.pad_token_id],
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    return tokenizer
