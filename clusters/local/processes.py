"""Processes that outlive the command that starts them: recorded, marked, and ended with all their descendants.

A record in .aerie/local.json names the first process of a service. All its descendants inherit a mark in their environment, so that
stopping finds them all, whoever their parent is by then, and touches nobody else's.
"""

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
STATE_FOLDER = ROOT / ".aerie"
STATE_FILE = STATE_FOLDER / "local.json"
MARK_VARIABLE = "AERIE_SERVICE"

START_TIMEOUT_S = 300.0  # a busy small machine takes minutes to import it all
TERM_TIMEOUT_S = 15.0
POLL_S = 0.5


class LocalError(Exception):
    """Something on this machine is in the way; the message says what to do."""


@dataclass(frozen=True)
class Service:
    """How to start one service and how to know that it answers."""

    name: str
    command: list[str]
    ports: dict[str, int]
    """Ports that must be free, each under the variable that changes it."""
    environment: dict[str, str]
    url: str
    answers: Callable[[], bool]

    @property
    def log(self) -> Path:
        return STATE_FOLDER / f"{self.name}.log"


@dataclass(frozen=True)
class Record:
    """What was started: enough to find it again and to end it."""

    pid: int
    created_at: float
    """Start time of the process: a recycled pid has another."""
    mark: str
    ports: dict[str, int]
    url: str

    def process(self) -> psutil.Process | None:
        try:
            process = psutil.Process(self.pid)
            same = process.create_time() == self.created_at and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if same else None


def start(service: Service) -> Record:
    mark = f"{service.name}-{uuid.uuid4().hex}"
    common = {MARK_VARIABLE: mark, "DO_NOT_TRACK": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    inherited = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}
    with open(service.log, "wb") as log:
        process = subprocess.Popen(
            service.command,
            cwd=ROOT,
            env=inherited | common | service.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C in the terminal of `make demo` is not for them
        )
    return Record(process.pid, psutil.Process(process.pid).create_time(), mark, service.ports, service.url)


def wait_for(service: Service, record: Record) -> bool:
    """True once the service answers; False when its process ends or the time is up."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and record.process() is not None:
        if service.answers():
            return True
        time.sleep(POLL_S)
    return False


def stop(record: Record) -> int:
    """End the service and all that carries its mark; the number of processes ended."""
    found = set(marked_processes(record.mark))
    first = record.process()
    if first is not None:
        send(first, signal.SIGTERM)  # the service ends its children in its own order
        psutil.wait_procs([first], timeout=TERM_TIMEOUT_S)
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        rest = set(marked_processes(record.mark))
        found |= rest
        for process in rest:
            send(process, signal_number)
        psutil.wait_procs(list(rest), timeout=TERM_TIMEOUT_S)
    return len(found)


def send(process: psutil.Process, signal_number: signal.Signals) -> None:
    try:
        process.send_signal(signal_number)
    except psutil.NoSuchProcess:
        return  # it was faster


def marked_processes(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if mark_of(process) == mark]


def mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK_VARIABLE)
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return None


def read_records() -> dict[str, Record]:
    if not STATE_FILE.exists():
        return {}
    return {name: Record(**fields) for name, fields in json.loads(STATE_FILE.read_text()).items()}


def remember(name: str, record: Record) -> None:
    write_records({**read_records(), name: record})


def forget(name: str) -> None:
    write_records({other: record for other, record in read_records().items() if other != name})


def write_records(records: dict[str, Record]) -> None:
    tree: dict[str, Any] = {name: asdict(record) for name, record in records.items()}
    temporary = STATE_FILE.with_suffix(".tmp")
    temporary.write_text(json.dumps(tree, indent=1))
    temporary.replace(STATE_FILE)
