"""From the name of a target to a folder with its weights and the facts about it that a head depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.hub import HUB_ID, first_line, snapshot
from components.section import ConfigError
from components.target.bundled import get_bundle, materialize_bundled
from components.target.refusals import find_refusal

if TYPE_CHECKING:  # seconds to import, and a run that finds its target described never needs it
    from transformers import PreTrainedConfig

    from components.target.template_check import TemplateFacts

BUNDLED_PREFIX = "bundled:"
WEIGHTS = "*.safetensors"
DOWNLOADED = ["*.json", "*.jinja", WEIGHTS, "*.model", "*.txt"]
NOT_DOWNLOADED = ["original/*", "consolidated*", "onnx/*"]


@dataclass(frozen=True)
class ResolvedTarget:
    """A target on this machine's disk; all sizes are the text model's."""

    path: str
    """Folder with config, safetensors and tokenizer."""
    model: str
    """The name that was given."""
    revision: str
    """Commit of a Hugging Face id; the digest otherwise."""
    digest: str
    """sha256 that stands for the content: of every byte of a local folder's files, of the bundled file and its
    conversion, or of id and commit."""
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    eos_token_ids: list[int]
    """Every id that ends an answer, from config and generation config."""
    bos_token_id: int | None
    pad_token_id: int | None
    dtype: str
    """dtype of the stored weights, such as `bfloat16`."""
    tie_word_embeddings: bool
    chat_template_kwargs: dict[str, Any]
    """The switches under which the chat template was checked."""
    chat_template: TemplateFacts


def resolve_target(
    model: str, revision: str | None, output_dir: Path, template_kwargs: Mapping[str, Any] | None = None
) -> ResolvedTarget:
    """Find the target's files, fetching or converting them, and refuse early what no head can be served with.

    Args:
        model: `bundled:NAME`, a local folder, or a Hugging Face id. Remote code is never trusted.
        revision: Branch, tag or commit of a Hugging Face id; None is its default branch.
        output_dir: Where a bundled target is converted to; nothing is written for the others.
        template_kwargs: Switches of the chat template, from `target.chat_template_kwargs`.

    Raises:
        ConfigError: at `target.model`, `target.revision` or `target.chat_template_kwargs`, with a fix.
    """
    if not model.startswith(BUNDLED_PREFIX) and not Path(model).is_dir():
        path = _download(model, revision, template_kwargs)
        digest = hashlib.sha256(f"{model}@{path.name}".encode()).hexdigest()
        return _describe(model, path, digest, path.name, template_kwargs)
    if revision is not None:
        raise ConfigError("target.revision", f"{model} has no revisions", "remove it; it goes with Hugging Face ids")
    if model.startswith(BUNDLED_PREFIX):
        path = materialize_bundled(model.removeprefix(BUNDLED_PREFIX), output_dir)
        return _describe(model, path, bundled_digest(model), None, template_kwargs)
    _check_folder(model, Path(model))
    return _describe(model, Path(model).resolve(), folder_digest(Path(model)), None, template_kwargs)


def target_identity(model: str, revision: str | None) -> str:
    """What a target is right now, without converting or downloading its weights: a digest, or a commit.

    Raises:
        ConfigError: at `target.model` or `target.revision`, with a fix.
    """
    if model.startswith(BUNDLED_PREFIX):
        return bundled_digest(model)
    if Path(model).is_dir():
        return folder_digest(Path(model))
    return _snapshot(_hub_id(model), revision, ["config.json"]).name


def target_shape(model: str, revision: str | None) -> Mapping[str, Any]:
    """The sizes of `ResolvedTarget` that cost and storage depend on, from the target's config alone.

    Raises:
        ConfigError: at `target.model` or `target.revision`, with a fix.
    """
    if model.startswith(BUNDLED_PREFIX):
        return get_bundle(model.removeprefix(BUNDLED_PREFIX)).shape
    folder = Path(model) if Path(model).is_dir() else _snapshot(_hub_id(model), revision, ["config.json"])
    return _shape(_read_config(model, folder))


def bundled_digest(model: str) -> str:
    """Digest of a bundled target, known without converting it."""
    identity = get_bundle(model.removeprefix(BUNDLED_PREFIX)).identity
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def folder_digest(folder: Path) -> str:
    """sha256 over the name and every byte of the files that vLLM and transformers read, in name order."""
    digest = hashlib.sha256()
    files = {file for pattern in DOWNLOADED for file in folder.glob(pattern) if file.is_file()}
    for file in sorted(files):
        state = file.stat()
        content = _file_sha256(file, state.st_size, state.st_mtime_ns)
        digest.update(f"{file.name}\0{content}\n".encode())
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _file_sha256(file: Path, size: int, mtime_ns: int) -> str:
    """A run asks several times; a file of many gigabytes is read once as long as its size and time stay."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_folder(model: str, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        fix = "name a folder that `save_pretrained` wrote"
        raise ConfigError("target.model", f"the folder {model} has no config.json", fix)
    _require_safetensors(model, folder)


def _require_safetensors(model: str, folder: Path) -> None:
    if not any(folder.glob(WEIGHTS)):
        fix = "save the model again with `save_pretrained`, which writes safetensors"
        raise ConfigError("target.model", f"{model} has no *.safetensors: pickled weights are not read", fix)


def _download(model: str, revision: str | None, template_kwargs: Mapping[str, Any] | None) -> Path:
    """The snapshot's folder in the Hugging Face cache, named by its commit; the weights come last.

    config.json is judged before anything else, and the chat template before the weights.
    """
    small = _snapshot(_hub_id(model), revision, ["config.json"])
    config = _read_config(model, small)
    small = _snapshot(model, small.name, [pattern for pattern in DOWNLOADED if pattern != WEIGHTS])
    _check_template(config, small, template_kwargs)
    folder = _snapshot(model, small.name, DOWNLOADED)
    _require_safetensors(model, folder)
    return folder


def _hub_id(model: str) -> str:
    if not HUB_ID.fullmatch(model):
        raise ConfigError("target.model", f"the folder {model} does not exist", "name an existing folder or a model id")
    return model


def _snapshot(model: str, revision: str | None, patterns: list[str]) -> Path:
    return snapshot(
        model, revision, "model", patterns, NOT_DOWNLOADED, setting="target.model", revision_setting="target.revision"
    )


def _read_config(model: str, folder: Path) -> PreTrainedConfig:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        problem = f"transformers cannot read the config of {model} ({first_line(error)})"
        raise ConfigError("target.model", problem, "use a model without remote code") from None
    if refusal := find_refusal(config):
        raise ConfigError("target.model", refusal.reason, refusal.fix)
    return config


def _check_template(config: PreTrainedConfig, folder: Path, template_kwargs: Mapping[str, Any] | None) -> TemplateFacts:
    from components.target.chat import load_tokenizer
    from components.target.template_check import check_template

    return check_template(load_tokenizer(folder), _eos_token_ids(config, folder), template_kwargs)


def _describe(
    model: str, path: Path, digest: str, commit: str | None, template_kwargs: Mapping[str, Any] | None
) -> ResolvedTarget:
    config = _read_config(model, path)
    return ResolvedTarget(
        path=str(path),
        model=model,
        revision=commit or digest,
        digest=digest,
        architecture=config.architectures[0],
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        max_position_embeddings=config.max_position_embeddings,
        eos_token_ids=_eos_token_ids(config, path),
        bos_token_id=config.bos_token_id,
        pad_token_id=config.pad_token_id,
        dtype=str(config.dtype or "float32").removeprefix("torch."),
        chat_template_kwargs=dict(template_kwargs or {}),
        chat_template=_check_template(config, path, template_kwargs),
        **_shape(config),
    )


def _shape(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads or config.num_attention_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
    }


def _eos_token_ids(config: PreTrainedConfig, folder: Path) -> list[int]:
    """Ids from both files, each of which may hold one id, a list or none; in order, without repeats."""
    from transformers import GenerationConfig

    sources: list[Any] = [config.eos_token_id]
    if (folder / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(folder).eos_token_id)
    ids: dict[int, None] = {}
    for source in sources:
        ids.update(dict.fromkeys(source if isinstance(source, list) else [source] if source is not None else []))
    return list(ids)
