"""A process that is ended leaves its folder to the next one; nobody takes away what is in use."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from components.data.extractors.scratch import ScratchFolder

PREFIX = "states-"


def make_and_wait(parent: Path, said: Connection) -> None:
    folder = ScratchFolder(PREFIX, parent)
    (folder.path / "document.safetensors").write_bytes(bytes(1000))
    said.send(folder.path)
    signal.pause()


def test_folders_of_dead_processes_are_removed_and_those_of_others_are_not(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    found, processes = [], []
    for _ in range(2):
        mine, theirs = context.Pipe()
        process = context.Process(target=make_and_wait, args=(tmp_path, theirs))
        process.start()
        found.append(mine.recv())
        processes.append(process)
    dead, alive = processes
    assert dead.pid is not None
    os.kill(dead.pid, signal.SIGKILL)
    dead.join()
    elsewhere = tmp_path / "other-folder"
    elsewhere.mkdir()
    try:
        own = ScratchFolder(PREFIX, tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted([elsewhere, found[1], own.path])
        assert (found[1] / "document.safetensors").exists()
        own.remove()
        assert not own.path.exists()
    finally:
        alive.kill()
        alive.join()


def test_a_folder_of_this_process_is_not_taken_for_left(tmp_path: Path) -> None:
    first, second = ScratchFolder(PREFIX, tmp_path), ScratchFolder(PREFIX, tmp_path)
    assert first.path.is_dir()
    assert second.path.is_dir()
    first.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []
