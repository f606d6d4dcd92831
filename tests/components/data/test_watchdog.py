"""A process that hangs is ended, with its children, and says where; one that gives signs of life is left alone."""

import subprocess
import sys

import psutil

from tests.conftest import is_running, project_environment

TIMEOUT_S = 6.0  # a busy machine may keep the watching thread waiting for a second or two
PROCESS = """
import re, subprocess, sys, time
from components.data.watchdog import Watchdog

def hang_in_python():
    time.sleep(1000)

def hang_with_the_lock():
    re.match("(a+)+$", "a" * 100 + "b")  # 2 ** 100 steps

def go_on():
    global seen_at_s
    for _ in range(30):
        time.sleep(0.1)
        seen_at_s = time.monotonic()

timeout_s, what = float(sys.argv[1]), sys.argv[2]
print(subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL).pid, flush=True)
seen_at_s = time.monotonic()
dog = Watchdog(timeout_s, lambda: seen_at_s, lambda words: print(words, flush=True))
with dog.watching():
    globals()[what]()
time.sleep(1.5 * timeout_s)  # nobody watches an idle process
print("idle", flush=True)
"""


def run(what: str) -> tuple[int, list[str], int]:
    """The exit code, the lines that the process said, and the pid of its child."""
    command = [sys.executable, "-c", PROCESS, str(TIMEOUT_S), what]
    done = subprocess.run(command, env=project_environment(), stdout=subprocess.PIPE, text=True, timeout=120)
    pid, *said = done.stdout.splitlines()
    return done.returncode, said, int(pid)


def test_a_process_that_hangs_says_where_and_ends_with_its_children() -> None:
    code, said, child = run("hang_in_python")
    assert code == 1
    assert any("in hang_in_python" in line for line in said)
    assert said[-1] == f"no sign of life for {TIMEOUT_S:g} s (data.stall_timeout_s)"
    assert not is_running(child)


def test_native_code_that_keeps_pythons_lock_is_ended_without_a_word() -> None:
    code, said, child = run("hang_with_the_lock")
    psutil.Process(child).kill()
    assert (code, said) == (1, [])


def test_signs_of_life_keep_a_process_and_idle_ones_are_not_watched() -> None:
    code, said, child = run("go_on")
    psutil.Process(child).kill()
    assert (code, said) == (0, ["idle"])
