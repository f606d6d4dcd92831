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

from components.storage import FULL_BYTES, Location, full_place, is_full
from tests.conftest import project_environment

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
RUN_TWICE = """
import json, sys
from pathlib import Path
import torch
from components.section import ConfigError
from components.data.parts import PartAccount, part_name
from components.data.shards import StoredDocument, feature_row, write_shard
from components.stage import Outcome, Stage, run_stage
from components.storage import Location

disk = Path(sys.argv[1])
ballast = disk / "ballast"
ballast.write_bytes(bytes(400_000))
states = torch.ones(100, 512)
written = []

def record(inputs, output):
    for number in range(7):  # of 100 kB each
        if not output.join(part_name(number)).exists():
            mask = torch.arange(100) > 50
            document = StoredDocument(torch.arange(100), mask, states[:, :384], states[:, 384:], f"p{number}:0", "x")
            write_shard(output.join(part_name(number)), [feature_row(document, f"p{number}", "train")], PartAccount(1))
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


def in_a_full_disk(folder: Path) -> dict:
    """What the script above printed; skips where no file system can be mounted."""
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a file system in a namespace")
    mount = f'mount -t tmpfs -o size=1m tmpfs {folder} && exec {sys.executable} -c "$0" {folder}'
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", mount, RUN_TWICE], capture_output=True, text=True, env=project_environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_full_disk_ends_the_stage_with_one_line_and_loses_nothing(tmp_path: Path):
    seen = in_a_full_disk(tmp_path)
    num_kept = len(seen["first"])
    assert 0 < num_kept < 7
    assert "\n" not in seen["line"]
    assert seen["line"].startswith(f"storage.uri: no space left at {tmp_path}/features/")
    assert f"[Errno 28] No space left on device); {num_kept} finished files of features (0." in seen["line"]
    assert "repeat the command" in seen["line"]
    parts = {name: stamp for name, stamp in seen["kept"].items() if "part-" in name}
    assert len(parts) == num_kept  # no half-written one beside them
    assert not any(".tmp-" in name for name in [*seen["kept"], *seen["end"]])
    assert seen["second"] == list(range(num_kept, 7))
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
