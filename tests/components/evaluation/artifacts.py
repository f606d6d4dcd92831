"""A finished target, recorded responses and heads as the stages read them."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.config import Settings
from components.data.answers import write_answers
from components.data.parts import PartAccount, part_name
from components.stage import Artifact
from components.storage import Location
from tests.tiny import FIRST_ORDINARY_ID


def make_artifact(stage: str, folder: Path, facts: dict[str, Any]) -> Artifact:
    return Artifact(
        stage, Location(str(folder)), "fingerprint", {"facts": facts, "digest": f"digest of {stage}", "files": {}}
    )


def target_artifact(path: Path, vocab_size: int) -> Artifact:
    return make_artifact(
        "target",
        path.parent,
        {"model": str(path), "path": str(path), "digest": "target digest", "vocab_size": vocab_size},
    )


def write_responses(folder: Path, rows: Sequence[dict[str, Any]]) -> Artifact:
    """Answered turns in one shard; each row gives key, family, split, prompt_ids and output_ids."""
    folder.mkdir(parents=True)
    filled = [{"turn": 0, "prompt_key": row["key"], "finish_reason": "length"} | row for row in rows]
    write_answers(Location(str(folder)).join(part_name(0)), filled, PartAccount(kept=len(filled)))
    return make_artifact("responses", folder, {})


def random_prompts(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(FIRST_ORDINARY_ID, vocab) for _ in range(length)] for length in lengths]


def tiny_settings(target: Path, **sections: dict[str, Any]) -> Settings:
    return Settings.model_validate(
        {"target": {"model": str(target), "dtype": "float32", "max_model_len": 256}, **sections}
    )
