"""A bundle's way to S3: file by file, read back and compared, its SHA256SUMS last, so that half a bundle never looks whole."""

import hashlib
import logging
from pathlib import Path
from typing import Any

import boto3
from boto3.exceptions import S3UploadFailedError
from botocore.exceptions import BotoCoreError, ClientError

from components.publishing.bundle import SUMS, BundleError, read_sums, verify_bundle
from components.section import ConfigError

log = logging.getLogger("aerie")

BLOCK_BYTES = 1 << 22


def upload_bundle(folder: Path, uri: str) -> str:
    """Copy the bundle to `uri`/<first 16 digits of its digest>/ and check what arrived; the address of the copy.

    Files that arrived whole before, in an interrupted upload, are kept.

    Args:
        folder: A sealed bundle.
        uri: `s3://bucket/prefix`.

    Raises:
        BundleError: the folder is no intact bundle, or what S3 gives back differs from what was sent.
        ConfigError: S3 cannot be reached or refuses.
    """
    digest = verify_bundle(folder)
    bucket, _, prefix = uri.removeprefix("s3://").strip("/").partition("/")
    place = "/".join(part for part in (prefix, digest[:16]) if part)
    files = read_sums(folder) | {SUMS: digest}  # in this order: the sums make the copy a bundle
    try:
        client = boto3.client("s3")
        for name, sha256 in files.items():
            _send(client, folder / name, bucket, f"{place}/{name}", sha256)
    except (BotoCoreError, ClientError, S3UploadFailedError) as error:
        raise ConfigError(
            "publish.bundle_uri",
            f"{uri} did not take the bundle ({error})",
            "check bucket, address and credentials, then repeat the command: what arrived is kept",
        ) from None
    return f"s3://{bucket}/{place}"


def _send(client: Any, path: Path, bucket: str, key: str, sha256: str) -> None:
    if _remote_sha256(client, bucket, key) == sha256:
        return
    log.info("uploading %s to s3://%s/%s (%.1f MB)", path.name, bucket, key, path.stat().st_size / 1e6)
    client.upload_file(str(path), bucket, key)
    if _remote_sha256(client, bucket, key) != sha256:
        raise BundleError(f"s3://{bucket}/{key} is not what was sent: repeat the command")


def _remote_sha256(client: Any, bucket: str, key: str) -> str | None:
    """sha256 of the object's content as S3 returns it; None when there is no such object."""
    try:
        body = client.get_object(Bucket=bucket, Key=key)["Body"]
    except ClientError as error:
        if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
            return None
        raise
    digest = hashlib.sha256()
    for block in body.iter_chunks(BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()
