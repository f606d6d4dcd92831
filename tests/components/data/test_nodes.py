"""A stage spread over several Ray nodes comes to its end when one of them is killed."""

import json
import subprocess
import sys

from components.storage import Location
from tests.components.data.counting import numbers_in, times_made
from tests.components.data.nodes import NUM_PARTS, ROWS_PER_PART, SAID
from tests.conftest import project_environment


def test_a_killed_node_costs_no_row(tmp_path):
    output = Location(str(tmp_path / "output"))
    # a Ray of its own, in a process of its own; .venv limits Ray to one node
    environment = project_environment() | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", "RAY_ADDRESS": ""}
    command = [sys.executable, "-m", "tests.components.data.nodes", output.uri]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(output.join(SAID).read_bytes())
    assert said["alive"] == 2
    assert said["doomed"] in said["nodes"]
    assert len(said["nodes"]) >= 2
    numbers = list(range(NUM_PARTS * ROWS_PER_PART))
    assert numbers_in(output) == numbers
    assert max(times_made(output).values()) > 1, "the node was killed while it made nothing"
