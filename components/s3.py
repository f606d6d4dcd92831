"""S3 by boto3, where pyarrow has no way to do it: whole objects or none, conditional writes, deleting without traces.

Refusals and broken connections are OSErrors, as a folder and pyarrow raise them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import IO, Any

import boto3
from boto3.exceptions import S3UploadFailedError
from botocore.exceptions import BotoCoreError, ClientError

BLOCK_BYTES = 1 << 22
ERRORS: dict[str, type[OSError]] = {
    "NoSuchKey": FileNotFoundError,
    "PreconditionFailed": FileExistsError,
    "ConditionalRequestConflict": FileExistsError,
}


@lru_cache(maxsize=1)
def client() -> Any:
    """boto3's client, once a process: making one takes a tenth of a second."""
    return boto3.client("s3")


def read_blocks(uri: str) -> Iterator[bytes]:
    """The object's content; by one request, since several could meet different contents of one that is being replaced."""
    bucket, key = _split(uri)
    with _os_errors(uri):
        yield from client().get_object(Bucket=bucket, Key=key)["Body"].iter_chunks(BLOCK_BYTES)


def put(uri: str, data: bytes) -> None:
    bucket, key = _split(uri)
    with _os_errors(uri):
        client().put_object(Bucket=bucket, Key=key, Body=data)


def create(uri: str, data: bytes) -> bool:
    """Write the object only if there is none; False when there is."""
    bucket, key = _split(uri)
    try:
        with _os_errors(uri):
            client().put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
    except FileExistsError:
        return False
    return True


def upload(uri: str, stream: IO[bytes]) -> None:
    """Send all of a stream; what fails midway leaves no object (pyarrow's streams would leave half of one)."""
    bucket, key = _split(uri)
    stream.seek(0)
    with _os_errors(uri):
        client().upload_fileobj(stream, bucket, key)


def delete(uri: str) -> None:
    """Remove the object and all below it (pyarrow would leave an object for every folder that became empty).

    Raises:
        OSError: an object stays.
    """
    bucket, key = _split(uri)
    with _os_errors(uri):
        client().delete_object(Bucket=bucket, Key=key)
        pages = client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{key.rstrip('/')}/")
        for page in pages:
            keys = [{"Key": entry["Key"]} for entry in page.get("Contents", ())]
            # Of several objects S3 refuses some in an answer that is a success.
            refused = client().delete_objects(Bucket=bucket, Delete={"Objects": keys}).get("Errors") if keys else None
            if refused:
                first = refused[0]
                reason = f"{first.get('Code')}: {first.get('Message')}"
                raise OSError(
                    f"{uri}: {len(refused)} objects cannot be removed, the first is {first['Key']} ({reason})"
                )


def check(uri: str) -> None:
    """Raises OSError when the bucket cannot be listed."""
    bucket, prefix = _split(uri)
    with _os_errors(uri):
        client().list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)


def _split(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


@contextmanager
def _os_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except (BotoCoreError, ClientError, S3UploadFailedError) as error:
        code = error.response["Error"]["Code"] if isinstance(error, ClientError) else ""
        raise ERRORS.get(code, OSError)(f"{uri}: {error}") from error
