"""Features recorded on several Ray nodes are the same, row by row, when one of them is killed."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from components.data.capturing import CaptureWorker
from components.data.extractors.interface import extractor_spec
from components.data.part_worker import PartTask, Piece
from components.data.parts import part_name, part_names
from components.data.shards import read_shard
from components.storage import Location
from tests.components.data.answers import answered, random_ids, write_responses
from tests.components.data.nodes import (
    LAST_WORDS,
    MAX_TOKENS,
    NUM_PARTS,
    ROWS_PER_PART,
    SAID,
    SETTINGS,
    TARGET,
    num_captured,
)
from tests.conftest import free_port, project_environment

NUM_ROWS = NUM_PARTS * ROWS_PER_PART


def test_a_killed_node_costs_no_row_and_changes_none(tiny_target: Path, tmp_path: Path) -> None:
    responses, output = Location(str(tmp_path / "responses")), Location(str(tmp_path / "killed"))
    write_parts(responses)
    # a Ray of its own, in a process of its own; .venv limits Ray to one node
    environment = project_environment() | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", "RAY_ADDRESS": ""}
    command = [sys.executable, "-m", "tests.components.data.nodes", str(tiny_target), responses.uri, output.uri]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-4000:]

    said = json.loads(output.join(SAID).read_bytes())
    assert said["alive"] == 2
    assert said["lack"].startswith(
        "a node has gone: 3 x 1 CPUs do not fit in the cluster, whose nodes have 2 x 1 CPUs;"
    )
    assert said["doomed"] in said["nodes"]
    assert len(said["nodes"]) >= 2
    assert said["rows"] == f"in {NUM_ROWS}, kept {NUM_ROWS}, truncated 0"
    assert num_captured(output) == NUM_ROWS + LAST_WORDS, (
        "what the dead node had begun is captured again, and only that"
    )
    assert_same_shards(output, in_this_process(tiny_target, responses, Location(str(tmp_path / "alone"))))


def write_parts(responses: Location) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [answered(i, random_ids(MAX_TOKENS - i % 7, generator), 4 + i % 3, "train") for i in range(NUM_ROWS)]
    write_responses(responses, *(rows[start : start + ROWS_PER_PART] for start in range(0, NUM_ROWS, ROWS_PER_PART)))


def in_this_process(target: Path, responses: Location, output: Location) -> Location:
    worker = CaptureWorker(output, lambda done: None, responses, extractor_spec(SETTINGS, TARGET, str(target)))
    worker.make([Piece(PartTask(number), output.join(part_name(number))) for number in range(NUM_PARTS)])
    return output


def assert_same_shards(one: Location, other: Location) -> None:
    assert part_names(one) == part_names(other)
    for name in part_names(one):
        for left, right in zip(read_shard(one, name), read_shard(other, name), strict=True):
            assert left.key == right.key
            for field in ("input_ids", "loss_mask", "aux_hidden", "last_hidden"):
                assert torch.equal(getattr(left, field), getattr(right, field)), f"{field} of {left.key}"


def test_nodes_that_an_autoscaler_adds_are_waited_for(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ray-") as own:  # short: it holds sockets
        environment = project_environment() | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", "RAY_ADDRESS": ""}
        environment |= {"RAY_TMPDIR": own, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        command = [sys.executable, "-m", "tests.components.data.growing", str(tmp_path), str(free_port())]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr[-4000:]
    (lack,) = [line for line in done.stderr.splitlines() if line.startswith("resources.features")]
    assert lack.endswith(
        "1 x 2 CPUs do not fit in the cluster, whose nodes have 1 x 1 CPUs; an autoscaler is at work: it is waited for"
    )
    assert "starting Counter({'worker': 1})" in done.stdout
