"""Generated code is run here, and nowhere else: a process of its own that can reach nothing and ends when its time is up.

Layers, the strongest that this machine allows:

- Linux namespaces (`unshare`, no root needed): no network, no other process in sight, and whatever the program starts dies with it;
- Landlock: no file to write, none to read but Python's own library, no program to run;
- always: limits on CPU time, memory, files and (in namespaces) processes, no core dump, a stripped environment, an empty folder that is
  removed, Python's audit events (no sockets, processes, files to write, ctypes), and a wall clock that kills the whole group.

Where the first two are missing, the audit hook alone keeps a program from the network and the disk; native code could get around it,
so `isolation` says it and the run warns. The sandbox keeps harm away; it does not catch a program that cheats at its own test.
"""

import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

log = logging.getLogger("aerie")

PYTHON = Path(sys.executable).resolve()
"""Without the virtual environment around it: no installed package is seen."""
CHILD = Path(__file__).with_name("sandbox_child.py")
NAMESPACES = ("unshare", "--map-root-user", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child", "--")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
PROBE = "import collections, heapq, json, math, random, re, typing\nassert math.sqrt(4) == 2"
"""What a program needs at least; an isolation under which it does not pass is not used."""

Outcome = Literal["passed", "failed", "timed out"]


@dataclass(frozen=True)
class Limits:
    wall_s: float = 10.0
    memory_bytes: int = 1 << 30


@dataclass(frozen=True)
class Isolation:
    """What keeps a program in, beside the limits that hold everywhere."""

    namespaces: bool
    landlock: bool

    @property
    def is_full(self) -> bool:
        return self.namespaces and self.landlock


class NoSandbox(Exception):
    """Not even a harmless program runs in the sandbox of this machine."""


@lru_cache(maxsize=1)
def isolation() -> Isolation:
    """The strongest isolation of this machine, found by running a harmless program.

    Raises:
        NoSandbox: there is none.
    """
    has_unshare = shutil.which(NAMESPACES[0]) is not None
    for found in (Isolation(True, True), Isolation(True, False), Isolation(False, True), Isolation(False, False)):
        if (has_unshare or not found.namespaces) and run_program(PROBE, Limits(), found) == "passed":
            if not found.is_full:
                missing = [name for name, there in asdict(found).items() if not there]
                log.warning(
                    "sandbox: this machine allows no %s; generated code is kept in by limits and Python's audit hook only",
                    " and no ".join(missing),
                )
            return found
    raise NoSandbox(f"{PYTHON} does not run a program under limits")


def run_program(program: str, limits: Limits, isolation: Isolation) -> Outcome:
    """Run a program and say how it ended; `passed` only where it came to its last line.

    Args:
        program: Python source; the standard library is there, no other package.
        limits: Of this program.
        isolation: What the machine allows, from `isolation`.
    """
    token = secrets.token_hex(16)
    settings = {
        "token": token,
        "memory_bytes": limits.memory_bytes,
        "cpu_s": int(limits.wall_s) + 1,
        **asdict(isolation),
    }
    python = [str(PYTHON), "-I", "-S", "-B", "-c", CHILD.read_text(), json.dumps(settings)]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as result:
        process = subprocess.Popen(
            [*(NAMESPACES if isolation.namespaces else ()), *python],
            stdin=subprocess.PIPE, stdout=result, stderr=subprocess.DEVNULL, cwd=folder, env=ENVIRONMENT,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.communicate(program.encode(errors="replace"), timeout=limits.wall_s)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            _end(process)
        result.seek(0)
        return "passed" if result.read() == f"{token} passed".encode() else "failed"


def run_programs(programs: Sequence[str], limits: Limits, num_workers: int) -> list[Outcome]:
    """How each program ended, in their order; equal programs run once."""
    found, distinct = isolation(), list(dict.fromkeys(programs))
    with ThreadPoolExecutor(num_workers) as pool:
        outcomes = pool.map(lambda program: run_program(program, limits, found), distinct)
        ended = dict(zip(distinct, outcomes, strict=True))
    return [ended[program] for program in programs]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the group, and with `unshare` (the parent of the namespace) every process in it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
