"""Models and data sets of the Hugging Face Hub, as folders in its local cache that are named by their commit."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from components.section import ConfigError

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
LOCAL = {"model": "a local folder", "dataset": "local files with `path`"}


def snapshot(
    repo_id: str,
    revision: str | None,
    kind: Literal["model", "dataset"],
    patterns: Sequence[str],
    ignored: Sequence[str] = (),
    *,
    setting: str,
    revision_setting: str,
) -> Path:
    """The files of a repository that match `patterns`; without a network, those that the cache has of this revision.

    Returns:
        A folder whose name is the commit.

    Raises:
        ConfigError: at `setting` or `revision_setting`: no such repository or revision, no access, or no network.
    """
    try:
        folder = snapshot_download(
            repo_id,
            repo_type=kind,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
            max_workers=4,
        )
    except RevisionNotFoundError:
        fix = "name one of its branches, tags or commits"
        raise ConfigError(revision_setting, f"{repo_id} has no revision {revision!r}", fix) from None
    except GatedRepoError:
        page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{repo_id}"
        fix = f"accept its licence at {page} and log in with `hf auth login`"
        raise ConfigError(setting, f"{repo_id} is gated", fix) from None
    except (RepositoryNotFoundError, HFValidationError):
        problem = f"{repo_id} is neither a folder nor a Hugging Face {kind} that you may read"
        raise ConfigError(setting, problem, "check the spelling, or log in with `hf auth login`") from None
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        problem = f"{repo_id} is not in the local cache and Hugging Face cannot be reached ({first_line(error)})"
        raise ConfigError(setting, problem, f"check the network, or name {LOCAL[kind]}") from None
    return Path(folder)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
