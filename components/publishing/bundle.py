"""The bundle: one folder that holds a head as vLLM loads it, what was measured, where it comes from, and checksums of it all."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

HEAD_FILES = ("config.json", "model.safetensors")
SUMS = "SHA256SUMS"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


class BundleError(Exception):
    """A bundle that is not what its checksums say, or holds what a bundle must not hold."""


def head_digest(folder: Path) -> str:
    """sha256 that names a head: over the names and contents of its two files."""
    return digest_of_sums({name: file_sha256(folder / name) for name in HEAD_FILES})


def digest_of_sums(sums: Mapping[str, str]) -> str:
    """sha256 of the `SHA256SUMS` lines of `{file name: sha256}`."""
    return hashlib.sha256(sums_text(sums).encode()).hexdigest()


def sums_text(sums: Mapping[str, str]) -> str:
    """Lines that `sha256sum --check` reads, sorted by name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def seal_bundle(folder: Path) -> str:
    """Write SHA256SUMS over every file of `folder`, last of all; the bundle's digest."""
    text = sums_text({name: file_sha256(folder / name) for name in bundle_files(folder)})
    (folder / SUMS).write_text(text)
    return verify_bundle(folder)


def verify_bundle(folder: Path) -> str:
    """The bundle's digest (sha256 of its SHA256SUMS), after checking every file.

    Raises:
        BundleError: a file that is missing, changed, unlisted or pickled, or no SHA256SUMS.
    """
    if not (folder / SUMS).is_file():
        raise BundleError(f"{folder} has no {SUMS}: it is no bundle, or an unfinished one")
    listed = read_sums(folder)
    present = bundle_files(folder)
    if missing := sorted(set(listed) - set(present)):
        raise BundleError(f"{folder} lacks {', '.join(missing)}")
    if unlisted := sorted(set(present) - set(listed)):
        raise BundleError(f"{folder} holds files that {SUMS} does not list: {', '.join(unlisted)}")
    if absent := [name for name in HEAD_FILES if name not in listed]:
        raise BundleError(f"{folder} holds no head: {', '.join(absent)} missing")
    for name, digest in listed.items():
        if name.endswith(PICKLE_SUFFIXES):
            raise BundleError(f"{folder}/{name} looks pickled: a bundle holds safetensors and text only")
        if file_sha256(folder / name) != digest:
            raise BundleError(f"{folder}/{name} is not the file that {SUMS} lists: download it again")
    return file_sha256(folder / SUMS)


def read_sums(folder: Path) -> dict[str, str]:
    """{file name: sha256} of the bundle's SHA256SUMS."""
    lines = (folder / SUMS).read_text().splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def bundle_files(folder: Path) -> list[str]:
    """Names of the bundle's files but SHA256SUMS, sorted."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != SUMS)


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
