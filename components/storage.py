"""One way to read and write a folder or an S3 prefix: whole files, atomically, with checksums.

A reader never sees half a file: locally a file is written beside its place and renamed; an S3 object appears
when its upload ends. What fails midway leaves nothing.
"""

import errno
import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.fs as pafs

from components import s3
from components.section import ConfigError

TEMPORARY_MARK = ".tmp-"
IN_MEMORY_BYTES = 1 << 26  # of a file on its way to S3; what is longer waits in a temporary file
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_SPACE_TEXTS = tuple(os.strerror(code) for code in NO_SPACE)
NAMED_FILE = re.compile(rf"(?:{'|'.join(NO_SPACE_TEXTS)}): '([^']+)'")
FULL_BYTES = 1 << 24  # a file system with less is what was full


@dataclass(frozen=True)
class Location:
    """A file or folder at `uri` (an absolute path or s3://bucket/key); nothing needs to exist there yet."""

    uri: str

    @property
    def is_local(self) -> bool:
        return "://" not in self.uri

    @cached_property
    def path(self) -> Path:
        """The local path; ValueError on S3."""
        if not self.is_local:
            raise ValueError(f"{self.uri} is not a local path")
        return Path(self.uri)

    def join(self, *parts: str) -> "Location":
        return Location("/".join([self.uri.rstrip("/"), *parts]))

    @property
    def name(self) -> str:
        return self.uri.rstrip("/").rsplit("/", 1)[-1]

    def exists(self) -> bool:
        fs, path = self._filesystem()
        return fs.get_file_info(path).type != pafs.FileType.NotFound

    def size_bytes(self) -> int:
        fs, path = self._filesystem()
        return fs.get_file_info(path).size

    def read_bytes(self) -> bytes:
        """The whole file; FileNotFoundError when there is none."""
        return b"".join(self.blocks())

    def open(self) -> pa.NativeFile:
        """The file for reading at any place in it; FileNotFoundError when there is none."""
        fs, path = self._filesystem()
        return fs.open_input_file(path)

    def write_bytes(self, data: bytes) -> None:
        """Make the file hold `data`, all of it or nothing."""
        if not self.is_local:
            return s3.put(self.uri, data)
        with self.writer() as stream:
            stream.write(data)

    @contextmanager
    def writer(self) -> Iterator[IO[bytes]]:
        """A stream into the file, which appears whole when the block ends, and not at all when the block fails."""
        if not self.is_local:
            with tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES) as stream:
                yield stream
                s3.upload(self.uri, stream)
            return
        temporary = self._temporary()
        try:
            with open(temporary, "wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """A place on this machine's disk for a folder that will be this one: itself, or one that is sent to S3 at the end.

        What is in the folder already is not there on S3.
        """
        if self.is_local:
            yield self.path
            return
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / self.name
            yield folder
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                with path.open("rb") as stream:
                    s3.upload(self.join(path.relative_to(folder).as_posix()).uri, stream)

    def create(self, data: bytes) -> bool:
        """Write the file only if it does not exist; False when somebody else was first."""
        if not self.is_local:
            return s3.create(self.uri, data)
        temporary = self._temporary()
        try:
            _write_synced(temporary, data)
            os.link(temporary, self.path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def delete(self) -> None:
        """Remove a file, or a folder with all that is in it; nothing there is no error."""
        if not self.is_local:
            return s3.delete(self.uri)
        fs, path = self._filesystem()
        kind = fs.get_file_info(path).type
        if kind == pafs.FileType.Directory:
            fs.delete_dir(path)
        elif kind != pafs.FileType.NotFound:
            fs.delete_file(path)

    def delete_if_empty(self) -> None:
        """Remove a folder in which nothing is; S3 has no such folders."""
        if self.is_local:
            with suppress(OSError):
                self.path.rmdir()

    def files(self) -> list[str]:
        """Paths below this folder, relative to it and sorted; unfinished files are left out."""
        return sorted(name for name in self.sizes_bytes() if TEMPORARY_MARK not in name)

    def sizes_bytes(self) -> dict[str, int]:
        """{path below this folder: bytes} of every file, also of unfinished ones: what the folder takes."""
        return {path: info.size for path, info in self._below(recursive=True) if info.type == pafs.FileType.File}

    def stamps(self) -> dict[str, tuple[int, int]]:
        """{path: (bytes, ns of its last change)} of the finished files below this folder, or of this file as ``; empty: nothing is here."""
        found = {path: info for path, info in self._below(recursive=True) if TEMPORARY_MARK not in path}
        if not found:
            fs, path = self._filesystem()
            found = {"": fs.get_file_info(path)}
        return {path: (info.size, info.mtime_ns) for path, info in found.items() if info.type == pafs.FileType.File}

    def folders(self) -> list[str]:
        """Names of the folders right in this one, sorted."""
        return sorted(path for path, info in self._below(recursive=False) if info.type == pafs.FileType.Directory)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for block in self.blocks():
            digest.update(block)
        return digest.hexdigest()

    def fetch(self, copy: Path, sha256: Mapping[str, str]) -> Path:
        """A local folder with this folder's files: itself, or `copy`, in which every file has been checked.

        Args:
            copy: Where what lies on S3 is copied to; files that are there already are kept.
            sha256: Of every file, by its path below this folder.

        Raises:
            ValueError: a file is not what its checksum says.
        """
        if self.is_local:
            return self.path
        for name, digest in sha256.items():
            if not (copy / name).exists():
                self.join(name)._download(Location(str(copy / name)), digest)
        return copy

    def check(self) -> None:
        """Raises ConfigError when an S3 bucket cannot be read; a local folder is made when it is first written to."""
        if self.is_local:
            return
        try:
            s3.check(self.uri)
        except OSError as error:
            raise ConfigError(
                "storage.uri",
                f"S3 does not let us read it ({error})",
                "check the bucket, AWS_ENDPOINT_URL and the credentials, where `ray start` ran as well",
            ) from None

    def _below(self, recursive: bool) -> Iterator[tuple[str, pafs.FileInfo]]:
        fs, path = self._filesystem()
        base = path.rstrip("/") + "/"
        for info in fs.get_file_info(pafs.FileSelector(path, allow_not_found=True, recursive=recursive)):
            yield info.path.removeprefix(base), info

    def blocks(self) -> Iterator[bytes]:
        """The file in pieces, all of one moment of it; FileNotFoundError when there is none."""
        if self.is_local:
            with self.path.open("rb") as stream:
                while block := stream.read(s3.BLOCK_BYTES):
                    yield block
            return
        yield from s3.read_blocks(self.uri)

    def _filesystem(self) -> tuple[pafs.FileSystem, str]:
        if self.is_local:
            return pafs.LocalFileSystem(), self.uri
        bucket, _, key = self.uri.removeprefix("s3://").rstrip("/").partition("/")
        # The key as it stands, as boto3 takes it: in pyarrow's URIs a blank is an error, `#` an end and `%20` a blank.
        fs, root = pafs.FileSystem.from_uri(f"s3://{bucket}")
        return fs, f"{root}/{key}".rstrip("/")

    def _temporary(self) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.path.with_name(f"{self.path.name}{TEMPORARY_MARK}{uuid.uuid4().hex}")

    def _download(self, place: "Location", sha256: str) -> None:
        digest = hashlib.sha256()
        with place.writer() as stream:
            for block in self.blocks():
                digest.update(block)
                stream.write(block)
            if digest.hexdigest() != sha256:
                raise ValueError(f"{self.uri} is not what was written: its sha256 differs from its manifest's")


def is_unreachable(error: BaseException) -> bool:
    """Whether a storage does not let itself be read, unlike one that hands out damaged content.

    The operating system's errors have their number; those of pyarrow's S3 only their text.
    """
    return isinstance(error, OSError) and (error.errno is not None or "AWS Error" in str(error))


def is_full(error: BaseException) -> bool:
    """Whether a disk or a quota that is full is behind an error, be it Ray's, of another process or of a library."""
    return next(_full_causes(error), None) is not None


def full_place(error: BaseException, storage: Location) -> str:
    """What is full: the storage, or the file elsewhere (scratch, Ray's spilled objects) that the error names.

    Where it names none, it is the storage, unless that is S3 or has room and the folder of scratch files has not.
    """
    for cause in _full_causes(error):
        named = getattr(cause, "filename", None) or next(iter(NAMED_FILE.findall(str(cause))), None)
        if named and not (storage.is_local and str(named).startswith(storage.uri)):
            return str(named)
        if named:
            return storage.uri
    scratch = tempfile.gettempdir()
    if not storage.is_local or (_free_bytes(scratch) < FULL_BYTES <= _free_bytes(storage.uri)):
        return scratch
    return storage.uri


def _free_bytes(path: str) -> int:
    there = next((folder for folder in (Path(path), *Path(path).parents) if folder.exists()), Path("/"))
    return shutil.disk_usage(there).free


def _full_causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        found = pending.pop()
        if found is None or any(found is other for other in seen):
            continue
        seen.append(found)
        if getattr(found, "errno", None) in NO_SPACE or any(text in str(found) for text in NO_SPACE_TEXTS):
            yield found
        failures = getattr(found, "worker_failures", {})  # of Ray Train
        pending += [found.__cause__, found.__context__, getattr(found, "cause", None), *failures.values()]


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
