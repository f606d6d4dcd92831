"""Whole files, or none: on a folder and on S3, also when the writer is killed midway."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from components import s3
from components.section import ConfigError
from components.storage import Location
from tests.conftest import project_environment

WRITE_FOREVER = """
import sys
from components.storage import Location
while True:
    for letter in b"ab":
        Location(sys.argv[1]).write_bytes(bytes([letter]) * 8_000_000)
"""


@pytest.fixture(params=["folder", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "folder":
        return Location(str(tmp_path / "new"))
    return Location(f"{request.getfixturevalue('s3_bucket')}/new")


def test_a_location_that_was_never_written_is_empty(root: Location) -> None:
    assert not root.exists()
    assert root.files() == []
    with pytest.raises(FileNotFoundError):
        root.join("nothing").read_bytes()
    root.delete()


def test_files_are_read_as_written(root: Location) -> None:
    root.join("deep", "er", "file.bin").write_bytes(b"abc")
    root.join("top").write_bytes(b"")
    assert root.files() == ["deep/er/file.bin", "top"]
    assert root.join("deep/er/file.bin").read_bytes() == b"abc"
    assert root.join("deep/er/file.bin").size_bytes() == 3
    assert root.join("deep/er/file.bin").sha256() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    root.join("deep/er/file.bin").delete()
    assert root.files() == ["top"]


def test_a_name_is_taken_as_it_stands(root: Location) -> None:
    """By every way to read and to write: they are of two libraries on S3."""
    name = "a b%20c#d?e=f&g+h é日/i~.bin"
    for place in (root.join("x", name), root.join("y", name).join("deeper")):
        place.write_bytes(b"one")
        assert place.exists()
        with place.open() as stream:
            assert stream.read() == place.read_bytes() == b"one"
        with place.writer() as stream:
            stream.write(b"longer")
        assert place.size_bytes() == 6
    assert root.files() == [f"x/{name}", f"y/{name}/deeper"]
    assert root.join("y").folders() == [name.partition("/")[0]]
    root.join("y", name).delete()
    assert root.files() == [f"x/{name}"]


def test_of_many_creators_one_wins(root: Location) -> None:
    place, start, won = root.join("once"), threading.Barrier(8), []

    def contend(number: int) -> None:
        start.wait()
        if place.create(str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert place.read_bytes() == str(won[0]).encode()


def test_a_killed_writer_leaves_the_old_or_the_new_file(root: Location) -> None:
    place = root.join("file")
    place.write_bytes(b"first")
    for delay_s in (0.0, 0.03, 0.1):
        writer = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, place.uri], env=project_environment())
        while place.read_bytes() == b"first":
            time.sleep(0.02)
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        content = place.read_bytes()
        assert content in (b"a" * 8_000_000, b"b" * 8_000_000)
        assert root.files() == ["file"]  # what the killed writer left beside it is nobody's output
        place.write_bytes(b"first")


def test_fetch_checks_its_copy_of_an_s3_folder_and_leaves_a_local_one(root: Location, tmp_path: Path) -> None:
    root.join("a", "b").write_bytes(b"1")
    root.join("other").write_bytes(b"2")
    copy = tmp_path / "cache"
    sums = {"a/b": root.join("a", "b").sha256()}
    fetched = root.fetch(copy, sums)
    assert fetched == (root.path if root.is_local else copy)
    assert (fetched / "a" / "b").read_bytes() == b"1"
    if root.is_local:
        return
    assert not (copy / "other").exists()
    stamp = (copy / "a" / "b").stat().st_mtime_ns
    root.fetch(copy, sums)
    assert (copy / "a" / "b").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match="sha256 differs"):
        root.fetch(copy, {"other": sums["a/b"]})
    assert not (copy / "other").exists()


def test_a_staged_folder_is_there_when_the_block_ends(root: Location) -> None:
    with root.join("model").staged() as folder:
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "file").write_bytes(b"abc")
    assert root.files() == ["model/deep/file"]
    assert root.join("model", "deep", "file").read_bytes() == b"abc"


def test_a_writer_that_fails_leaves_nothing(root: Location) -> None:
    def write() -> None:
        with root.join("file").writer() as stream:
            stream.write(b"x" * 1000)
            raise RuntimeError("midway")

    with pytest.raises(RuntimeError):
        write()
    assert root.sizes_bytes() == {}


def test_sizes_and_folders_are_listed(root: Location) -> None:
    root.join("one", "two", "file").write_bytes(b"abc")
    root.join("three", "file").write_bytes(b"ab")
    assert root.folders() == ["one", "three"]
    assert root.sizes_bytes() == {"one/two/file": 3, "three/file": 2}
    assert root.join("nothing").folders() == []


def test_a_bucket_that_is_not_there_is_a_setting_to_mend(s3_bucket: str) -> None:
    Location(f"{s3_bucket}/prefix").check()
    with pytest.raises(ConfigError, match=r"storage\.uri: .*s3://no-such-bucket-of-ours/prefix.*NoSuchBucket"):
        Location("s3://no-such-bucket-of-ours/prefix").check()


def test_an_s3_location_has_no_path() -> None:
    with pytest.raises(ValueError, match="not a local path"):
        _ = Location("s3://bucket/key").path


def test_an_object_that_s3_does_not_remove_is_an_error(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Location(f"{s3_bucket}/kept")
    folder.join("a").write_bytes(b"1")
    real = s3.client()

    class Refusing:
        """The real client, but for an answer that this server never gives (a bucket policy, an object lock)."""

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def delete_objects(self, Bucket: str, Delete: dict) -> dict:
            return {"Errors": [{"Key": Delete["Objects"][0]["Key"], "Code": "AccessDenied", "Message": "locked"}]}

    monkeypatch.setattr(s3, "client", Refusing)
    with pytest.raises(OSError, match=r"1 objects cannot be removed, the first is kept/a \(AccessDenied: locked\)"):
        folder.delete()
