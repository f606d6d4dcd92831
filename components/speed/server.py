"""A plain vLLM server with the OpenAI API, on loopback, for as long as a block runs.

Its module is started and not the command `vllm serve`, which is the same but does not start with vLLM's CPU build.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from components.config import Settings
from components.evaluation.arms import Arm
from components.speed import leash
from components.speed.sweep import Served
from components.target.engine import engine_env, engine_kwargs

MODULE = "vllm.entrypoints.openai.api_server"
HOST = "127.0.0.1"
POLL_S = 0.5
METRICS_TIMEOUT_S = 60.0
REPLY_TIMEOUT_S = 600.0
TAIL_LINES = 25
MAX_ERRORS = 5
ERROR = re.compile(r"^(\([^)]*\) )?(ERROR [^]]*\] )?[\w.]*(Error|Exception): ")
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class ServerFailed(RuntimeError):
    """A vLLM server did not start, or died; the message ends with the end of its log."""

    def __init__(self, label: str, what: str, log_tail: str) -> None:
        super().__init__(label, what, log_tail)
        self.label, self.what, self.log_tail = label, what, log_tail

    def __str__(self) -> str:
        return f"speed: the server of {self.label} {self.what}. The end of its log:\n{self.log_tail}"


@dataclass(frozen=True)
class Server:
    label: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def metrics(self) -> str:
        """The text of `/metrics`; ServerFailed from a server that has died: a dead one makes no slow point and no invalid one."""
        with self.blamed():
            return httpx.get(f"{self.url}/metrics", timeout=METRICS_TIMEOUT_S, trust_env=False).raise_for_status().text

    def complete(self, **body: Any) -> dict[str, Any]:
        """The reply to a completion request; ServerFailed when there is none."""
        with self.blamed():
            reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=REPLY_TIMEOUT_S, trust_env=False)
            return reply.raise_for_status().json()

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """What goes wrong between us and the server is told with the end of its log."""
        try:
            yield
        except httpx.HTTPError as error:
            raise ServerFailed(self.label, f"does not answer ({error})", log_tail(self.log)) from None


def serve_arguments(settings: Settings, target: str, arm: Arm) -> list[str]:
    """The arguments of `vllm serve` for an arm, but for the address; everything that could change a figure is stated."""
    speed = settings.speed
    fixed: dict[str, Any] = {
        "seed": speed.seed,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "max_num_seqs": speed.max_num_seqs or speed.concurrencies[-1],
        "kv_cache_dtype": speed.kv_cache_dtype,
    }
    if arm.speculates:  # vLLM refuses the second where nothing speculates
        fixed |= {"speculative_config": arm.speculative_config(), "per_request_spec_decode_metrics": "summary"}
    kwargs = engine_kwargs(settings, settings.resources.evaluate, target, **fixed)
    return [word for name, value in kwargs.items() for word in _option(name, value)]


@contextmanager
def plain_server(settings: Settings, served: Served, arguments: list[str], log: Path) -> Iterator[Server]:
    """Start the server in a process group of its own, wait until it answers, and end it with the block.

    It also ends when this process dies, in whatever way.

    Args:
        settings: For its environment and how long it may take to start.
        served: What it serves.
        arguments: `serve_arguments`.
        log: File that receives all it says.

    Raises:
        ServerFailed: it ended, or did not answer in time.
    """
    port = _free_port()
    command = [sys.executable, "-m", MODULE, *arguments, "--host", HOST, "--port", str(port)]
    environment = os.environ | server_env(settings)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, leash.__file__, *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(served.label, f"http://{HOST}:{port}", process, log)
    try:
        _wait_until_healthy(server, settings.speed.start_timeout_s)
        yield server
    finally:
        _end(process)


def server_env(settings: Settings) -> dict[str, str]:
    """Variables of the server's process that are set for it; its log level is its own, because the log is kept."""
    environment = engine_env(settings.resources.evaluate)
    if "VLLM_LOGGING_LEVEL" not in settings.resources.evaluate.env:
        environment["VLLM_LOGGING_LEVEL"] = "INFO"
    return environment


def log_tail(log: Path) -> str:
    """The last lines of a log, after the errors before them: vLLM's last words are often "see root cause above"."""
    lines = ESCAPES.sub("", log.read_text(errors="replace")).splitlines()
    earlier, tail = lines[:-TAIL_LINES], lines[-TAIL_LINES:]
    errors = list(dict.fromkeys(line for line in earlier if ERROR.search(line)))
    return "\n".join([*errors[-MAX_ERRORS:], *(["..."] if errors else []), *tail])


def _option(name: str, value: Any) -> list[str]:
    """`enable_prefix_caching: False` -> `--no-enable-prefix-caching`."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if value is None:
        return []
    return [f"--{flag}", json.dumps(value) if isinstance(value, Mapping | list | tuple) else str(value)]


def _wait_until_healthy(server: Server, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    with httpx.Client(trust_env=False, timeout=5) as client:
        while time.monotonic() < deadline:
            if server.process.poll() is not None:
                raise ServerFailed(server.label, "did not start", log_tail(server.log))
            try:
                if client.get(f"{server.url}/health").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(POLL_S)
    raise ServerFailed(server.label, f"does not answer after {timeout_s:.0f} s", log_tail(server.log))


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
