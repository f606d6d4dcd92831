"""Identity, manifests, resume, leases and row accounting of stages, on real folders and S3."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from components.lease import LeaseHeld, LeaseLost
from components.rows import RowAccount, TooManyRowsLost, check_rows
from components.section import ConfigError
from components.stage import Artifact, InputChanged, Outcome, Output, Stage, find_artifact, run_stage
from components.storage import Location
from tests.conftest import project_environment

TTL_S = 30.0

SLOW_STAGE = """
import sys, time
from components.stage import Outcome, Stage, run_stage
from components.storage import Location

def run(inputs, output):
    for number in range(3):
        place = output.join(f"part-{number}")
        if not place.exists():
            place.write_bytes(str(number).encode())
            print(number, flush=True)
            time.sleep(float(sys.argv[2]))
    return Outcome({"parts": 3})

run_stage(Stage("slow", run, {}), {}, Location(sys.argv[1]), lease_ttl_s=30.0)
"""


@pytest.fixture(params=["folder", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    return Location(str(tmp_path) if request.param == "folder" else f"{request.getfixturevalue('s3_bucket')}/storage")


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    return Location(str(tmp_path))


def writer(name: str, text: str = "x", inputs: tuple[str, ...] = (), **config: object) -> Stage:
    def run(given: Mapping[str, Artifact], output: Output) -> Outcome:
        assert tuple(given) == inputs
        output.join("file").write_bytes(text.encode())
        return Outcome({"text": text}, RowAccount(2, 1, dropped={"empty": 1}))

    return Stage(name, run, config, inputs)


def test_the_second_run_writes_nothing(storage: Location) -> None:
    first, made = run_stage(writer("one"), {}, storage, TTL_S)
    assert made
    before = snapshot(storage)
    second, made_again = run_stage(writer("one"), {}, storage, TTL_S)
    assert not made_again
    assert second == first
    assert snapshot(storage) == before


def test_a_manifest_says_what_is_there(folder: Location) -> None:
    artifact, _ = run_stage(writer("one", "abc", setting=1), {}, folder, TTL_S)
    manifest = json.loads(artifact.join("_manifest.json").read_bytes())
    assert manifest["files"] == {"file": {"bytes": 3, "sha256": artifact.join("file").sha256()}}
    assert manifest["rows"]["dropped"] == {"empty": 1}
    assert manifest["config"] == {"setting": 1}
    assert manifest["versions"]["torch"]
    assert artifact.facts == {"text": "abc"}
    assert artifact.location.files() == ["_manifest.json", "file"]  # the lease is gone


def test_identity_is_content_not_history(folder: Location) -> None:
    """A stage whose input came out equal is found, whatever made the input; one whose input differs is not."""
    reader = writer("reader", inputs=("one",))
    by_first, _ = run_stage(writer("one", "same", setting=1), {}, folder, TTL_S)
    run_stage(reader, {"one": by_first}, folder, TTL_S)
    by_second, _ = run_stage(writer("one", "same", setting=2), {}, folder, TTL_S)
    assert by_second.fingerprint != by_first.fingerprint
    assert find_artifact(reader, {"one": by_second}, folder) is not None
    other, _ = run_stage(writer("one", "other", setting=3), {}, folder, TTL_S)
    assert find_artifact(reader, {"one": other}, folder) is None


@pytest.mark.parametrize(
    "other",
    [
        Stage("b", lambda i, o: Outcome(), {"k": 1}),
        Stage("a", lambda i, o: Outcome(), {"k": 2}),
        Stage("a", lambda i, o: Outcome(), {"k": 1}, version=2),
        Stage("a", lambda i, o: Outcome(), {"k": 1}, extra=lambda: {"vllm": "1"}),
        Stage("a", lambda i, o: Outcome(), {"k": 1}, extra_for=lambda inputs: {"champion": 3}),
    ],
    ids=["name", "config", "version", "extra", "extra_for"],
)
def test_everything_that_changes_an_output_changes_its_fingerprint(other: Stage) -> None:
    assert other.fingerprint({}) != Stage("a", lambda i, o: Outcome(), {"k": 1}).fingerprint({})


def test_a_fingerprint_does_not_depend_on_the_order_of_settings() -> None:
    one, two = ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1})
    assert Stage("a", lambda i, o: Outcome(), one).fingerprint({}) == Stage(
        "a", lambda i, o: Outcome(), two
    ).fingerprint({})


def test_working_state_is_no_content(folder: Location) -> None:
    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        output.join("file").write_bytes(b"1")
        output.join("_train", "checkpoint.bin").write_bytes(os.urandom(8))
        return Outcome()

    first, _ = run_stage(Stage("s", run, {}), {}, folder, TTL_S)
    again, made = run_stage(Stage("s", run, {}), {}, folder, TTL_S, force=True)
    assert made
    assert first.digest == again.digest


def test_force_starts_from_nothing(storage: Location) -> None:
    artifact, _ = run_stage(writer("one"), {}, storage, TTL_S)
    artifact.join("left_over").write_bytes(b"1")
    forced, made = run_stage(writer("one"), {}, storage, TTL_S, force=True)
    assert made
    assert "left_over" not in forced.location.files()


@pytest.mark.parametrize("damage", [b'{"files": {', b"[]", b"\xff\0"])
def test_a_damaged_manifest_is_named_with_what_to_do(folder: Location, damage: bytes) -> None:
    made, _ = run_stage(writer("one"), {}, folder, TTL_S)
    made.join("_manifest.json").write_bytes(damage)
    for look in (find_artifact, lambda *found: run_stage(*found, TTL_S)):
        with pytest.raises(
            ConfigError, match=r"_manifest\.json: it is no JSON.*Fix: delete it: the stage then goes on"
        ):
            look(writer("one"), {}, folder)
    again, was_made = run_stage(writer("one"), {}, folder, TTL_S, force=True)
    assert was_made
    assert again.digest == made.digest


def test_a_failed_stage_has_no_output_and_keeps_its_finished_files(storage: Location) -> None:
    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        if output.join("part-0").exists():
            return Outcome({"resumed": True})
        output.join("part-0").write_bytes(b"0")
        raise RuntimeError("disk full")

    stage = Stage("s", run, {})
    with pytest.raises(RuntimeError):
        run_stage(stage, {}, storage, TTL_S)
    assert find_artifact(stage, {}, storage) is None
    artifact, _ = run_stage(stage, {}, storage, TTL_S)
    assert artifact.facts == {"resumed": True}


def test_kill_9_then_the_same_command_goes_on(folder: Location) -> None:
    killed = slow_stage(folder, "60")
    assert killed.stdout is not None
    assert killed.stdout.readline() == "0\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    [part] = folder.path.glob("slow/*/part-0")
    first_written = part.stat().st_mtime_ns
    resumed = slow_stage(folder, "0")
    out, _ = resumed.communicate(timeout=60)
    assert resumed.returncode == 0
    assert out == "1\n2\n"
    assert part.stat().st_mtime_ns == first_written


def test_two_runs_cannot_write_one_output(folder: Location) -> None:
    process = slow_stage(folder, "60")
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(LeaseHeld, match=f"process {process.pid}"):
        run_stage(Stage("slow", lambda i, o: Outcome(), {}), {}, folder, TTL_S)
    process.kill()
    process.wait()


def test_the_loser_of_a_race_finds_the_winners_output(folder: Location) -> None:
    started, results = threading.Barrier(4), []

    def contend() -> None:
        started.wait()
        while True:
            try:
                results.append(run_stage(writer("one"), {}, folder, TTL_S))
                return
            except LeaseHeld:
                time.sleep(0.01)

    threads = [threading.Thread(target=contend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(made for _, made in results) == 1
    assert len({artifact.digest for artifact, _ in results}) == 1


def test_a_run_that_lost_its_lease_publishes_nothing(folder: Location) -> None:
    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        record = json.loads(output.join("_lease.json").read_bytes())
        output.join("_lease.json").write_bytes(json.dumps(record | {"owner": "another"}).encode())
        return Outcome()

    stage = Stage("s", run, {})
    with pytest.raises(LeaseLost):
        run_stage(stage, {}, folder, TTL_S)
    assert find_artifact(stage, {}, folder) is None


def test_a_file_that_changes_while_it_is_read_is_noticed(folder: Location) -> None:
    source = folder.join("prompts.jsonl")
    source.write_bytes(b"1")

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        output.join("file").write_bytes(source.read_bytes())
        source.write_bytes(b"2")
        return Outcome()

    stage = Stage("s", run, {}, extra=lambda: {"prompts.jsonl": source.sha256()})
    before = stage.fingerprint({})
    with pytest.raises(InputChanged, match=r"prompts\.jsonl changed"):
        run_stage(stage, {}, folder, TTL_S)
    assert folder.join("s", before).files() == []


def test_a_folder_of_an_output_on_s3_is_used_from_a_checked_copy(
    storage: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.stage.CACHE", tmp_path / "cache")

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        with output.join("head").staged() as folder:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "model").write_bytes(b"weights")
        output.join("curves").write_bytes(b"1")
        return Outcome()

    artifact, _ = run_stage(Stage("s", run, {}), {}, storage, TTL_S)
    folder = artifact.local("head")
    assert folder.is_relative_to(tmp_path / "cache") != storage.is_local
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [("model", b"weights")]
    artifact.join("head", "model").write_bytes(b"damaged")
    assert artifact.local("head") == folder
    if not storage.is_local:
        (folder / "model").unlink()
        with pytest.raises(ValueError, match="sha256 differs"):
            artifact.local("head")


def test_what_a_killed_writer_left_is_swept_away(folder: Location) -> None:
    stage = writer("one")
    left = folder.join("one", stage.fingerprint({}), "part-0.tmp-123")
    left.write_bytes(b"half")
    artifact, _ = run_stage(stage, {}, folder, TTL_S)
    assert set(artifact.location.sizes_bytes()) == {"_manifest.json", "file"}


def test_rows_must_add_up() -> None:
    with pytest.raises(ValueError, match="10 in, 9 accounted for"):
        RowAccount(rows_in=10, kept=6, truncated=1, dropped={"empty": 1}, failed={"template": 1})


def test_truncated_rows_are_kept_rows_lost_ones_are_counted() -> None:
    account = RowAccount(rows_in=10, kept=5, truncated=3, dropped={"empty": 1}, failed={"template": 1})
    assert account.lost == 2
    assert account.lost_fraction == 0.2
    assert RowAccount(0, 0).lost_fraction is None


def test_too_many_lost_rows_fail_with_the_table() -> None:
    account = RowAccount(rows_in=10, kept=8, dropped={"empty": 1}, failed={"template": 1})
    check_rows(account, 0.2, "prompts", "q.jsonl")
    with pytest.raises(TooManyRowsLost, match=r"prompts: 20.0%.*dropped\[empty\] 1, failed\[template\] 1.*q\.jsonl"):
        check_rows(account, 0.19, "prompts", "q.jsonl")
    check_rows(RowAccount(0, 0), 0.0, "prompts", "q.jsonl")


def slow_stage(storage: Location, pause_s: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW_STAGE, storage.uri, pause_s]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=project_environment())


def snapshot(storage: Location) -> dict[str, object]:
    names = storage.files()
    if storage.is_local:
        return {name: storage.join(name).path.stat().st_mtime_ns for name in names}
    return {name: storage.join(name).sha256() for name in names}
