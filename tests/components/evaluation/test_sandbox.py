"""Generated code that means harm, or only goes on for ever: nothing of it gets out, and right programs are told from wrong ones."""

import os
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from components.evaluation.sandbox import NAMESPACES, PYTHON, Isolation, Limits, isolation, run_program, run_programs

SHORT = Limits(wall_s=1.0)
GUARD_ALONE = Isolation(namespaces=False, landlock=False)


@pytest.fixture(scope="module")
def best() -> Isolation:
    return isolation()


def left_behind() -> list[psutil.Process]:
    """Processes of a sandbox that still live once those that were killed had time to go."""
    found = [p for p in psutil.process_iter(["cmdline"]) if any("REFUSED_EVENTS" in a for a in p.info["cmdline"] or [])]
    return psutil.wait_procs(found, timeout=30)[1]


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("assert sorted([2, 1]) == [1, 2]", "passed"),
        ("import collections, dataclasses, heapq, itertools, math, re, typing, unittest", "passed"),
        ("print('x' * 10**6)\nif __name__ == '__main__': input()", "passed"),
        ("assert sorted([2, 1]) == [2, 1]", "failed"),
        ("def broken(:", "failed"),
        ("import sys; sys.exit(0)", "failed"),  # an exit code says nothing: the tests behind it never ran
        ("import os; os._exit(0)", "failed"),
        ("\ud800", "failed"),
        ("import numpy", "failed"),
    ],
)
def test_only_a_program_that_comes_to_its_end_passes(best: Isolation, program: str, outcome: str) -> None:
    assert run_program(program, Limits(), best) == outcome


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import os\nos.setsid()\nwhile True: pass",
        "import time\ntry:\n    time.sleep(60)\nexcept BaseException:\n    time.sleep(60)",
        "import threading, time\nfor _ in range(10**6):\n    threading.Thread(target=time.sleep, args=(60,)).start()\ntime.sleep(60)",
    ],
)
def test_what_never_ends_is_killed_with_all_its_processes(best: Isolation, program: str) -> None:
    assert run_program(program, SHORT, best) in ("timed out", "failed")
    assert left_behind() == []


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import _posixsubprocess",
        "import ctypes\nctypes.CDLL(None).fork()",
        "data = bytearray(8 << 30)",
        "data = []\nwhile True: data.append(bytearray(1 << 29))",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1')",
        "import os\nos.kill(1, 9)",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    ],
)
def test_a_program_that_reaches_out_fails(best: Isolation, program: str) -> None:
    assert run_program(program, Limits(), best) == "failed"
    assert left_behind() == []


def test_the_weakest_sandbox_still_refuses_what_python_sees() -> None:
    attempts = ["os.fork()", "os.system('true')", "os.posix_spawn('/bin/true', ['true'], {})", "socket.socket()"]
    programs = [f"import os, socket\n{attempt}" for attempt in attempts]

    assert {run_program(program, Limits(), GUARD_ALONE) for program in programs} == {"failed"}


@pytest.mark.parametrize(("mode", "weakest"), [("w", False), ("r+", False), ("a", True), ("x", True)])
def test_nothing_is_written(best: Isolation, tmp_path: Path, mode: str, weakest: bool) -> None:
    place = tmp_path / "file"
    if mode == "r+":
        place.write_text("kept")

    assert (
        run_program(f"open({str(place)!r}, {mode!r}).write('x')", Limits(), GUARD_ALONE if weakest else best)
        == "failed"
    )
    assert not place.exists() or place.read_text() == "kept"


def test_landlock_keeps_files_where_python_says_nothing(best: Isolation, tmp_path: Path) -> None:
    """`os.mkfifo` raises no audit event: only the kernel stands in its way."""
    if not best.landlock:
        pytest.skip("no Landlock here")
    fifo, secret = tmp_path / "fifo", tmp_path / "secret"
    secret.write_text("token")

    assert run_program(f"import os\nos.mkfifo({str(fifo)!r})", Limits(), best) == "failed"
    assert not fifo.exists()
    assert run_program(f"open({str(secret)!r}).read()", Limits(), best) == "failed"
    assert run_program(f"open({str(secret)!r}).read()", Limits(), GUARD_ALONE) == "passed"


def test_namespaces_have_no_network_where_python_says_nothing(best: Isolation) -> None:
    if not best.namespaces:
        pytest.skip("no namespaces here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        ask = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)"
        command = [str(PYTHON), "-I", "-c", ask]
        assert subprocess.run(command, capture_output=True).returncode == 0
        assert subprocess.run([*NAMESPACES, *command], capture_output=True).returncode != 0


def test_the_environment_is_not_the_callers(best: Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    assert run_program("import os\nassert 'AWS_SECRET_ACCESS_KEY' not in os.environ", Limits(), best) == "passed"
    assert run_program(f"import os\nassert os.getcwd() != {os.getcwd()!r}", Limits(), best) == "passed"


def test_equal_programs_run_once_and_keep_their_order() -> None:
    programs = ["assert True", "assert False", "assert True"]
    assert run_programs(programs, Limits(), 2) == ["passed", "failed", "passed"]
