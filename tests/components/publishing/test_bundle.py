"""A bundle is what its checksums say, on disk and on S3, or an error that names the file."""

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import boto3
import pytest
import torch
from safetensors.torch import save_file

from components.publishing.bundle import BundleError, head_digest, seal_bundle, verify_bundle
from components.publishing.upload import upload_bundle
from components.section import ConfigError


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.arange(6.0)}, folder / "model.safetensors")
    (folder / "README.md").write_text("# A head\n")
    seal_bundle(folder)
    return folder


def test_the_digest_is_that_of_the_sums_which_coreutils_accept(bundle: Path) -> None:
    assert verify_bundle(bundle) == hashlib.sha256((bundle / "SHA256SUMS").read_bytes()).hexdigest()
    checked = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=bundle, capture_output=True)
    assert checked.returncode == 0
    assert checked.stdout.count(b": OK") == 3


def test_a_heads_digest_is_its_two_files(bundle: Path) -> None:
    before = head_digest(bundle)
    (bundle / "README.md").write_text("another card")
    assert head_digest(bundle) == before
    save_file({"weight": torch.arange(6.0) + 1e-3}, bundle / "model.safetensors")
    assert head_digest(bundle) != before


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "model.safetensors is not the file"),
        (lambda folder: (folder / "config.json").unlink(), "lacks config.json"),
        (lambda folder: (folder / "extra.txt").write_text("x"), "does not list: extra.txt"),
        (lambda folder: (folder / "SHA256SUMS").unlink(), "has no SHA256SUMS"),
    ],
    ids=["changed", "missing", "unlisted", "unfinished"],
)
def test_a_spoiled_bundle_is_refused(bundle: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(bundle)
    with pytest.raises(BundleError, match=message):
        verify_bundle(bundle)


@pytest.mark.parametrize("name", ["optimizer.pt", "pytorch_model.bin", "deep/state.pkl"])
def test_nothing_pickled_is_sealed(bundle: Path, name: str) -> None:
    (bundle / name).parent.mkdir(exist_ok=True)
    torch.save({}, bundle / name)
    with pytest.raises(BundleError, match="looks pickled"):
        seal_bundle(bundle)


def test_a_folder_without_a_head_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("empty")
    with pytest.raises(BundleError, match=r"no head: config\.json, model\.safetensors missing"):
        seal_bundle(tmp_path)


def test_an_upload_arrives_whole_and_a_second_one_sends_nothing(bundle: Path, s3_bucket: str, tmp_path: Path) -> None:
    uri = upload_bundle(bundle, f"{s3_bucket}/heads/")
    assert uri == f"{s3_bucket}/heads/{verify_bundle(bundle)[:16]}"
    assert verify_bundle(download(uri, tmp_path / "copy")) == verify_bundle(bundle)
    before = modified(uri)
    assert upload_bundle(bundle, f"{s3_bucket}/heads") == uri
    assert modified(uri) == before


def test_an_interrupted_upload_goes_on_and_mends_what_is_damaged(bundle: Path, s3_bucket: str, tmp_path: Path) -> None:
    uri = upload_bundle(bundle, s3_bucket)
    client, (bucket, prefix) = boto3.client("s3"), split(uri)
    client.delete_object(Bucket=bucket, Key=f"{prefix}/SHA256SUMS")
    client.put_object(Bucket=bucket, Key=f"{prefix}/model.safetensors", Body=b"half")
    before = modified(uri)
    upload_bundle(bundle, s3_bucket)
    assert verify_bundle(download(uri, tmp_path / "copy")) == verify_bundle(bundle)
    assert modified(uri)["config.json"] == before["config.json"]


def test_a_bucket_that_does_not_exist_names_the_setting(bundle: Path, s3_bucket: str) -> None:
    with pytest.raises(ConfigError, match=r"publish\.bundle_uri: s3://nowhere-at-all/x did not take the bundle"):
        upload_bundle(bundle, "s3://nowhere-at-all/x")


def test_a_server_that_does_not_answer_names_the_setting(
    bundle: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(ConfigError, match=r"publish\.bundle_uri: .*Could not connect"):
        upload_bundle(bundle, s3_bucket)


def split(uri: str) -> tuple[str, str]:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return bucket, prefix


def download(uri: str, folder: Path) -> Path:
    folder.mkdir()
    bucket, prefix = split(uri)
    for name in modified(uri):
        boto3.client("s3").download_file(bucket, f"{prefix}/{name}", str(folder / name))
    return folder


def modified(uri: str) -> dict[str, object]:
    bucket, prefix = split(uri)
    found = boto3.client("s3").list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]
    return {entry["Key"].removeprefix(f"{prefix}/"): (entry["LastModified"], entry["ETag"]) for entry in found}
