"""The data stages on S3: the same code as on a folder, with a real Ray and a real S3 server."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load
from typer.testing import CliRunner

from components.config import Settings
from components.data.features import record_features
from components.data.parts import QUARANTINE, part_name, part_names
from components.data.verify import Verification
from components.data.vocabulary import VOCABULARY, build_vocabulary
from components.storage import Location
from pipelines.data import app
from tests.components.data.test_features import TARGET, make_responses


@pytest.fixture
def settings() -> Settings:
    return Settings.model_validate(
        {
            "target": {"dtype": "float32", "max_model_len": 256},
            "data": {"batch_tokens": 64},
            "draft": {"aux_layers": [1, 4]},
        }
    )


def test_features_and_vocabulary_are_made_resumed_and_verified(
    ray_cluster, tiny_target: Path, settings: Settings, s3_bucket: str
):
    responses, output = Location(f"{s3_bucket}/s/responses/a"), Location(f"{s3_bucket}/s/features/b")
    rows = make_responses(responses)
    outcome = record_features(settings, responses, 200, TARGET, str(tiny_target), output)
    assert outcome.rows.kept == len(rows)
    assert part_names(output) == [part_name(0), part_name(1)]
    assert output.join(QUARANTINE).read_bytes() == b""
    sums = {name: output.join(name).sha256() for name in part_names(output)}
    output.join(part_name(1)).delete()
    assert record_features(settings, responses, 200, TARGET, str(tiny_target), output).rows == outcome.rows
    assert output.join(part_name(0)).sha256() == sums[part_name(0)]

    build_vocabulary(responses, 40, 512, [2], output.join("vocabulary"))
    ids = load(output.join("vocabulary", VOCABULARY).read_bytes())["draft_token_ids"]
    assert len(ids) == 40
    assert 2 in ids

    verification = Verification(pytest.fail)
    verification.check(output)
    assert verification.rows == outcome.facts["documents"]
    done = CliRunner().invoke(app, ["--verify", output.uri])
    assert (done.exit_code, json.dumps(done.stdout).count("bad")) == (0, 1)  # "no bad"
