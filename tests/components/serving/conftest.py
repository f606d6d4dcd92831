"""Two real arms behind the router, on a tiny target: one deployment for every test of the folder that wants it."""

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoConfig

from components.config import Settings
from components.config_loading import load_settings
from components.data.prompt_list import write_prompts
from components.data.prompts import Prompt
from components.draft.checkpoint import save_head
from components.draft.head import DraftHead, HeadConfig
from components.serving.apps import Service
from components.serving.deploy import deploy, teardown
from components.serving.stages import ab_service
from components.stage import Artifact
from components.storage import Location
from tests.conftest import free_port
from tests.tiny import FIRST_ORDINARY_ID, SWITCH, add_switch

K = 3
TOKEN = "operators-only"
QUESTIONS = ("Why does bread rise?", "Count the ships.", "Write a total of values.", "What is a glacier?")


@dataclass(frozen=True)
class Deployed:
    settings: Settings
    inputs: dict[str, Artifact]
    service: Service
    started_s: float


@pytest.fixture(scope="session")
def random_head(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `head/`: a P-EAGLE head of the tiny target that never learned anything."""
    torch.manual_seed(0)
    shape = {"aux_layers": (2, 3), "num_layers": 1, "draft_vocab_size": 300, "mask_token_id": FIRST_ORDINARY_ID - 1}
    head = DraftHead(HeadConfig.from_target(AutoConfig.from_pretrained(tiny_target), **shape), torch.arange(300))
    folder = tmp_path_factory.mktemp("random-head")
    save_head(head, folder / "head", torch.float32)
    return folder


@pytest.fixture(scope="session")
def served_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with a switch in its chat template."""
    path = Path(shutil.copytree(tiny_target, tmp_path_factory.mktemp("served") / "target"))
    add_switch(path)
    return path


@pytest.fixture(scope="session")
def stage_inputs(
    served_target: Path, random_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Artifact]:
    """What the `ab` stage reads, where there is no champion yet."""
    folder = tmp_path_factory.mktemp("prompts")
    prompts = [Prompt(f"p{i}", f"f{i % 2}", _turns(i, q), None, "file", i) for i, q in enumerate(QUESTIONS)]
    write_prompts(Location(str(folder)), prompts, {p.key: "held_out" for p in prompts})
    facts = {"target": {"model": str(served_target), "path": str(served_target)}, "incumbent": {"version": None}}
    facts |= {"drafts": {"drafts": {}}, "evaluation": {"candidate": {"place": "head"}}}
    places = {"prompts": folder, "head": random_head}
    return {
        name: Artifact(
            name,
            Location(str(places.get(name, served_target))),
            name,
            {"digest": name, "facts": facts.get(name, {}), "files": {}},
        )
        for name in ("target", "prompts", "head", "incumbent", "drafts", "evaluation")
    }


def _turns(index: int, question: str) -> list[dict[str, str]]:
    """Every other conversation has a second turn."""
    messages = [{"role": "user", "content": question}]
    return [*messages, {"role": "user", "content": "Go on."}] if index % 2 else messages


@pytest.fixture(scope="module")
def deployed(
    ray_cluster, served_target: Path, stage_inputs: dict[str, Artifact], tmp_path_factory: pytest.TempPathFactory
):
    """Arms `none` and `challenger`, half of the sessions each; operators have a token."""
    token = tmp_path_factory.mktemp("secrets") / "token"
    token.write_text(TOKEN)
    overrides = [f"target.model={served_target}", "target.dtype=float32", "target.max_model_len=256"]
    overrides += [f"target.chat_template_kwargs={json.dumps(SWITCH)}"]
    overrides += [f"ab.port={free_port()}", "ab.requests=12", "ab.max_new_tokens=12", f"ab.admin_token_file={token}"]
    settings = load_settings(None, None, [*overrides, f"evaluate.num_speculative_tokens={K}"])
    service = ab_service(settings, stage_inputs)
    started = time.monotonic()
    deploy(service)
    yield Deployed(settings, stage_inputs, service, time.monotonic() - started)
    teardown()


@pytest.fixture
def client(deployed: Deployed):
    with httpx.Client(base_url=deployed.service.address, timeout=120, trust_env=False) as client:
        yield client
