"""A disk that fills up while a stage writes: one line that says what is kept, and the same run goes on once there is room.

The disk is a real file system of one megabyte, mounted in a namespace of its own.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from components.storage import FULL_BYTES, Location, full_place, is_full
from tests.components.data.answers import answered, random_ids, write_responses
from tests.conftest import project_environment

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
NUM_PARTS, NUM_TOKENS = 7, 256
"""A part takes about 100 kB."""
RUN_TWICE = """
import json, sys
from pathlib import Path
from components.config import Settings
from components.data.capturing import CaptureWorker
from components.data.extractors.interface import extractor_spec
from components.data.part_worker import PartTask, Piece
from components.data.parts import part_name, part_names
from components.section import ConfigError
from components.stage import Outcome, Stage, run_stage
from components.storage import Location

disk, responses, target = Path(sys.argv[1]), Location(sys.argv[2]), sys.argv[3]
ballast = disk / "ballast"
ballast.write_bytes(bytes(400_000))
settings = Settings.model_validate({"target": {"dtype": "float32"}, "draft": {"aux_layers": [1, 4]}})
SHAPE = {"num_layers": 6, "hidden_size": 64}  # of the tiny target
written = []

def record(inputs, output):
    worker = CaptureWorker(output.location, lambda done: None, responses, extractor_spec(settings, SHAPE, target))
    for number in range(len(part_names(responses))):
        if not output.join(part_name(number)).exists():
            worker.make([Piece(PartTask(number), output.join(part_name(number)))])
            written.append(number)
    return Outcome()

def files():
    return {str(p.relative_to(disk)): p.stat().st_mtime_ns for p in disk.rglob("*") if p.is_file()}

stage = Stage("features", record, {})
try:
    run_stage(stage, {}, Location(str(disk)), 60)
except ConfigError as error:
    line = str(error)
first, kept = written[:], files()
ballast.unlink()
artifact, _ = run_stage(stage, {}, Location(str(disk)), 60)
print(json.dumps({"line": line, "first": first, "second": written[len(first):], "kept": kept, "end": files()}))
"""


def in_a_full_disk(disk: Path, responses: Location, target: Path) -> dict:
    """What the script above printed; skips, with the reason, where no file system can be mounted."""
    allowed = shutil.which("unshare") and subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True)
    if not allowed or allowed.returncode:
        why = allowed.stderr.strip() if allowed else "there is no `unshare`"
        pytest.skip(f"a disk that really is full takes a mount of one's own, which this machine refuses: {why}")
    mount = f'mount -t tmpfs -o size=1m tmpfs {disk} && exec {sys.executable} -c "$0" {disk} {responses.uri} {target}'
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", mount, RUN_TWICE], capture_output=True, text=True, env=project_environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_full_disk_ends_the_stage_with_one_line_and_loses_nothing(tmp_path: Path, tiny_target: Path):
    """The stage's own worker records features of a real target."""
    responses, disk = Location(str(tmp_path / "responses")), tmp_path / "disk"
    disk.mkdir()
    generator = torch.Generator().manual_seed(0)
    ids = [random_ids(NUM_TOKENS, generator) for _ in range(NUM_PARTS)]
    write_responses(responses, *([answered(number, of, 4, "train")] for number, of in enumerate(ids)))
    seen = in_a_full_disk(disk, responses, tiny_target)
    num_kept = len(seen["first"])
    assert 0 < num_kept < NUM_PARTS
    assert "\n" not in seen["line"]
    assert seen["line"].startswith(f"storage.uri: no space left at {disk}/features/")
    assert f"[Errno 28] No space left on device); {num_kept} finished files of features (0." in seen["line"]
    assert "repeat the command" in seen["line"]
    parts = {name: stamp for name, stamp in seen["kept"].items() if "part-" in name}
    assert len(parts) == num_kept  # no half-written one beside them
    assert not any(".tmp-" in name for name in [*seen["kept"], *seen["end"]])
    assert seen["second"] == list(range(num_kept, NUM_PARTS))
    assert {name: seen["end"][name] for name in parts} == parts  # finished shards were left alone
    assert any(name.endswith("_manifest.json") for name in seen["end"])


def test_a_full_disk_is_recognised_behind_other_errors():
    cause = OSError(28, "No space left on device")
    wrapped = RuntimeError("the task failed")
    wrapped.__cause__ = cause
    of_a_worker = RuntimeError("training failed")
    of_a_worker.worker_failures = {0: wrapped}  # type: ignore[attr-defined]
    by_text = ValueError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert all(is_full(error) for error in (cause, wrapped, of_a_worker, by_text))
    assert not is_full(OSError(13, "Permission denied"))
    cause.__cause__ = wrapped  # a circle ends, too
    assert is_full(wrapped)


def test_the_place_that_is_full_is_named_not_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    storage, scratch = Location(str(tmp_path / "storage")), "/scratch/spilled-1"
    named = OSError(28, "No space left on device", scratch)
    told = RuntimeError(f"task failed\nOSError: [Errno 28] No space left on device: '{scratch}'")
    assert [full_place(error, storage) for error in (named, told)] == [scratch, scratch]
    own = OSError(28, "No space left on device", storage.join("part-00000.parquet.tmp-1").uri)
    assert full_place(own, storage) == storage.uri
    unnamed = OSError(28, "No space left on device")
    assert full_place(unnamed, Location("s3://bucket/runs")) == tempfile.gettempdir()
    for full, place in ((storage.uri, storage.uri), (tempfile.gettempdir(), tempfile.gettempdir())):
        free = {full: 0}
        monkeypatch.setattr("components.storage._free_bytes", lambda path, free=free: free.get(path, FULL_BYTES))
        assert full_place(unnamed, storage) == place
