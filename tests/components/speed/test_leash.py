"""A server's process group ends with whoever holds it, and a server that does not come up says why."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from components.config import Settings
from components.evaluation.arms import Arm
from components.speed import leash, server
from components.speed.server import ServerFailed, log_tail, plain_server, serve_arguments
from components.speed.sweep import Served

ENDS_WITHIN_S = 30
PARENT = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"
HOLDER = (
    "import subprocess, sys, time; p = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True);"
    "print(p.pid, flush=True); time.sleep(600)"
)


def held(command: list[str]) -> list[str]:
    return [sys.executable, leash.__file__, *command]


def family(pid: int) -> list[psutil.Process]:
    """The leash, its command and the command's child, once all are there."""
    first = psutil.Process(pid)
    while len(found := [first, *first.children(recursive=True)]) < 3:
        time.sleep(0.05)
    return found


def all_gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=ENDS_WITHIN_S)[1]


def test_all_of_it_ends_when_the_holder_lets_go() -> None:
    process = subprocess.Popen(
        held([sys.executable, "-c", PARENT]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    members = family(process.pid)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(ENDS_WITHIN_S)
    assert all_gone(members)


def test_all_of_it_ends_when_the_holder_is_killed() -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *held([sys.executable, "-c", PARENT])], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    members = family(int(holder.stdout.readline()))
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert all_gone(members)


def test_what_a_dying_command_leaves_behind_ends_too() -> None:
    process = subprocess.Popen(
        held([sys.executable, "-c", PARENT]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    members = family(process.pid)
    members[1].kill()
    process.wait(ENDS_WITHIN_S)
    assert all_gone(members)


def test_a_server_that_ends_at_once_is_an_error_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MODULE", "no_such_server")
    settings = Settings.model_validate({"speed": {"concurrencies": [1]}})

    with (
        pytest.raises(
            ServerFailed, match=r"the server of none did not start\. The end of its log:(\n|.)*No module named"
        ),
        plain_server(settings, Served(Arm("none", "none")), [], tmp_path / "server.log"),
    ):
        pass


def test_the_arguments_of_an_arm_are_those_of_vllm_serve() -> None:
    settings = Settings.model_validate({"speed": {"concurrencies": [1, 8], "kv_cache_dtype": "fp8"}})

    plain = serve_arguments(settings, "/model", Arm("none", "none"))
    ngram = serve_arguments(settings, "/model", Arm("ngram", "ngram", 3))

    stated = {
        name: plain[plain.index(name) + 1] for name in ("--max-num-seqs", "--kv-cache-dtype", "--generation-config")
    }
    assert list(stated.values()) == ["8", "fp8", "vllm"]
    assert {"--no-enable-prefix-caching", "--no-trust-remote-code"} <= set(plain)
    assert "--speculative-config" not in plain
    assert ngram[ngram.index("--speculative-config") + 1] == '{"method": "ngram", "num_speculative_tokens": 3}'


def test_the_end_of_a_log_is_shown_with_the_errors_before_it(tmp_path: Path) -> None:
    """vLLM ends with "see root cause above", a hundred lines below it."""
    log = tmp_path / "server.log"
    cause = "(EngineCore pid=7) ERROR 11-30 07:45:22 [core.py:1] ValueError: no KV cache fits"
    log.write_text(
        "\n".join(["\x1b[0;36mINFO up\x1b[0m", cause, "torch.OutOfMemoryError: 3 GiB", *["line"] * 99, "last"])
    )

    shown = log_tail(log).splitlines()

    assert shown[:3] == [cause, "torch.OutOfMemoryError: 3 GiB", "..."]
    assert shown[-1] == "last"
    assert len(shown) < 30
