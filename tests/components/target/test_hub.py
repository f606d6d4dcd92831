"""Targets by Hugging Face id, against a local server that speaks the Hub's API."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Gemma2Config

from tests.components.target.hub import COMMIT, GATED, HubHandler, serve_hub
from tests.tiny import make_tiny_llama

# the Hub's address and cache are read when huggingface_hub is imported: so a process of its own
RESOLVE_ALL = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from components.section import ConfigError
from components.target.resolve import resolve_target

answers = []
for model, revision in json.load(sys.stdin):
    try:
        answers.append(asdict(resolve_target(model, revision, Path("unused"))))
    except ConfigError as error:
        answers.append(str(error))
json.dump(answers, sys.stdout)
"""


def resolve_all(cases: list[tuple[str, str | None]], endpoint: str, cache: Path) -> list:
    """What `resolve_target` answers to each (model, revision): its facts, or the error as text."""
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    process = subprocess.run(
        [sys.executable, "-c", RESOLVE_ALL], input=json.dumps(cases), env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address and cache of a hub with a good model, one without safetensors, and two that are refused."""
    root = tmp_path_factory.mktemp("hub")
    make_tiny_llama(root / "lab" / "tiny")
    make_tiny_llama(root / "lab" / "pickled")
    (root / "lab" / "pickled" / "model.safetensors").rename(root / "lab" / "pickled" / "pytorch_model.bin")
    unmaskable = make_tiny_llama(root / "lab" / "unmaskable")
    (unmaskable / "chat_template.jinja").write_text("{{ messages }}")
    refused = make_tiny_llama(root / "lab" / "refused")
    Gemma2Config(architectures=["Gemma2ForCausalLM"]).save_pretrained(refused)
    with serve_hub(root) as address:
        yield address, tmp_path_factory.mktemp("cache")


CASES: list[tuple[str, str | None]] = [
    ("lab/tiny", None),
    ("lab/tiny", COMMIT),
    ("lab/tiny", "v9"),
    ("lab/nothing", None),
    (GATED, None),
    ("lab/pickled", None),
    ("lab/refused", None),
    ("lab/unmaskable", None),
]


@pytest.fixture(scope="module")
def answers(hub: tuple[str, Path]) -> list:
    return resolve_all(CASES, *hub)


def test_ids_resolve_to_a_commit(answers: list) -> None:
    default, pinned = answers[:2]
    assert default["revision"] == pinned["revision"] == COMMIT
    assert default["digest"] == pinned["digest"]
    assert Path(default["path"], "model.safetensors").is_file()
    assert default["num_layers"] == 6


def test_ids_that_cannot_be_used_name_the_setting(answers: list) -> None:
    errors = answers[2:]
    assert errors[0].startswith("target.revision: lab/tiny has no revision 'v9'")
    assert errors[1].startswith("target.model: lab/nothing is neither a folder nor a Hugging Face model")
    assert errors[2].startswith(f"target.model: {GATED} is gated")
    assert errors[3].startswith("target.model: lab/pickled has no *.safetensors")
    assert errors[4].startswith("target.model: Gemma2ForCausalLM scales or caps its logits")
    assert errors[5].startswith("target.model: the chat template opens the assistant's turn in a prompt in another way")


def test_weights_of_a_refused_target_are_not_downloaded(answers: list) -> None:
    requests = HubHandler.requests
    assert [path for path in requests if "/lab/refused/resolve/" in path and path.endswith("config.json")]
    assert [path for path in requests if "/lab/unmaskable/resolve/" in path and path.endswith("chat_template.jinja")]
    for name in ("refused", "unmaskable"):
        assert not [path for path in requests if name in path and path.endswith(".safetensors")]
    assert not [path for path in requests if path.endswith(".bin")]


def test_without_a_network_the_cache_is_used(hub: tuple[str, Path], answers: list) -> None:
    _, cache = hub
    cached, unknown = resolve_all([("lab/tiny", None), ("lab/other", None)], "http://127.0.0.1:9", cache)
    assert cached == answers[0]
    assert unknown.startswith("target.model: lab/other is not in the local cache and Hugging Face cannot be reached")
