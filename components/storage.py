"""One way to read and write a folder or an S3 prefix: whole files, atomically, with checksums.

A reader never sees half a file: locally a file is written beside its place and renamed; an S3 object appears
when its upload ends.
"""

import hashlib
import io
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import boto3
import pyarrow as pa
import pyarrow.fs as pafs
from botocore.exceptions import ClientError

TEMPORARY_MARK = ".tmp-"


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
        fs, path = self._filesystem()
        with fs.open_input_stream(path) as stream:
            return stream.read()

    def open(self) -> pa.NativeFile:
        """The file for reading at any place in it; FileNotFoundError when there is none."""
        fs, path = self._filesystem()
        return fs.open_input_file(path)

    def write_bytes(self, data: bytes) -> None:
        """Make the file hold `data`, all of it or nothing."""
        if not self.is_local:
            fs, path = self._filesystem()
            with fs.open_output_stream(path) as stream:
                stream.write(data)
            return
        with self.writer() as stream:
            stream.write(data)

    @contextmanager
    def writer(self) -> Iterator[IO[bytes]]:
        """A stream into the file, which appears whole when the block ends, and not at all when the block fails."""
        if not self.is_local:
            buffer = io.BytesIO()
            yield buffer
            self.write_bytes(buffer.getvalue())
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

    def create(self, data: bytes) -> bool:
        """Write the file only if it does not exist; False when somebody else was first."""
        if not self.is_local:
            return self._create_on_s3(data)
        temporary = self._write_beside(data)
        try:
            os.link(temporary, self.path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def delete(self) -> None:
        """Remove a file, or a folder with all that is in it; nothing there is no error."""
        fs, path = self._filesystem()
        kind = fs.get_file_info(path).type
        if kind == pafs.FileType.Directory:
            fs.delete_dir(path)
        elif kind != pafs.FileType.NotFound:
            fs.delete_file(path)

    def files(self) -> list[str]:
        """Paths below this folder, relative to it and sorted; unfinished files are left out."""
        return sorted(name for name in self.sizes_bytes() if TEMPORARY_MARK not in name)

    def sizes_bytes(self) -> dict[str, int]:
        """{path below this folder: bytes} of every file, also of unfinished ones: what the folder takes."""
        return {path: info.size for path, info in self._below(recursive=True) if info.type == pafs.FileType.File}

    def folders(self) -> list[str]:
        """Names of the folders right in this one, sorted."""
        return sorted(path for path, info in self._below(recursive=False) if info.type == pafs.FileType.Directory)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for block in self._blocks():
            digest.update(block)
        return digest.hexdigest()

    def fetch(self, cache: Path) -> Path:
        """A local folder with this folder's files: itself, or a verified-by-size copy under `cache`."""
        if self.is_local:
            return self.path
        copy = cache / hashlib.sha256(self.uri.encode()).hexdigest()[:16]
        for name in self.files():
            source, place = self.join(name), Location(str(copy / name))
            if not place.exists() or place.size_bytes() != source.size_bytes():
                place.write_bytes(source.read_bytes())
        return copy

    def _below(self, recursive: bool) -> Iterator[tuple[str, pafs.FileInfo]]:
        fs, path = self._filesystem()
        base = path.rstrip("/") + "/"
        for info in fs.get_file_info(pafs.FileSelector(path, allow_not_found=True, recursive=recursive)):
            yield info.path.removeprefix(base), info

    def _blocks(self) -> Iterator[bytes]:
        fs, path = self._filesystem()
        with fs.open_input_stream(path) as stream:
            while block := stream.read(1 << 22):
                yield block

    def _filesystem(self) -> tuple[pafs.FileSystem, str]:
        if self.is_local:
            return pafs.LocalFileSystem(), self.uri
        return pafs.FileSystem.from_uri(self.uri)

    def _temporary(self) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.path.with_name(f"{self.path.name}{TEMPORARY_MARK}{uuid.uuid4().hex}")

    def _write_beside(self, data: bytes) -> Path:
        temporary = self._temporary()
        with open(temporary, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        return temporary

    def _create_on_s3(self, data: bytes) -> bool:
        # pyarrow has no conditional put
        bucket, _, key = self.uri.removeprefix("s3://").partition("/")
        try:
            boto3.client("s3").put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
        except ClientError as error:
            if error.response["Error"]["Code"] in ("PreconditionFailed", "ConditionalRequestConflict"):
                return False
            raise
        return True
