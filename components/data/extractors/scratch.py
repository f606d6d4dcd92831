"""Folders on this machine that go with the process that made them: itself removes them, or the next process does.

A process may end without a word, so each holds a lock in its folder, which the system gives back whatever happens to it.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

LOCK = "_lock"
IN_THE_MAKING = "new-"


class ScratchFolder:
    """A new folder, and none that a dead process left behind."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        """Removes what is stale and makes a folder.

        Args:
            prefix: Of the names of all folders of this use.
            parent: Where they are; None: where this machine keeps temporary files.
        """
        parent = parent or Path(tempfile.gettempdir())
        for stale in parent.glob(f"{prefix}*"):
            _remove_if_left(stale)
        made = Path(tempfile.mkdtemp(prefix=f"{IN_THE_MAKING}{prefix}", dir=parent))
        self._lock = (made / LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = parent / made.name.removeprefix(IN_THE_MAKING)
        os.rename(made, self.path)  # nobody finds it unlocked

    def remove(self) -> None:
        """The folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_if_left(folder: Path) -> None:
    with suppress(OSError), (folder / LOCK).open("rb") as lock:  # another user's, or gone meanwhile
        if _is_free(lock):
            shutil.rmtree(folder, ignore_errors=True)


def _is_free(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
