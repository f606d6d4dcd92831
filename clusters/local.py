#!/usr/bin/env python
"""Start and stop what one machine needs: a Ray head with its dashboard and an MLflow server, both on loopback only.

`make up`, `make down` and `make status` call this. What it started is recorded in .aerie/local.json: the first process of each
service and a mark that all its descendants carry in their environment, so that stopping ends them all and nobody else's.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer

HOST = "127.0.0.1"
ROOT = Path(__file__).resolve().parent.parent
STATE_FOLDER = ROOT / ".aerie"
STATE_FILE = STATE_FOLDER / "local.json"
MARK_VARIABLE = "AERIE_SERVICE"
BIN = Path(sys.executable).parent

START_TIMEOUT_S = 120.0
TERM_TIMEOUT_S = 15.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

RayPort = Annotated[int, typer.Option(envvar="RAY_PORT", help="Port of Ray's control store (GCS).")]
DashboardPort = Annotated[int, typer.Option(envvar="RAY_DASHBOARD_PORT", help="Port of the Ray dashboard and job API.")]
MlflowPort = Annotated[int, typer.Option(envvar="MLFLOW_PORT", help="Port of the MLflow server.")]
NumCpus = Annotated[int, typer.Option(envvar="RAY_NUM_CPUS", help="Logical CPUs that Ray may hand out.")]


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


@app.command()
def up(
    ray_port: RayPort = 6379,
    dashboard_port: DashboardPort = 8265,
    mlflow_port: MlflowPort = 5000,
    num_cpus: NumCpus = 8,
) -> None:
    """Start what is not running yet and wait until it answers."""
    STATE_FOLDER.mkdir(exist_ok=True)
    for service in (mlflow_service(mlflow_port), ray_service(ray_port, dashboard_port, num_cpus)):
        ensure_running(service)


@app.command()
def down() -> None:
    """Stop what `up` started here, with all its children, and nothing else."""
    records = read_records()
    if not records:
        print("down: nothing that `make up` started here is running")
    for name, record in records.items():
        count = stop(record)
        forget(name)
        print(f"down: {name} stopped ({count} processes)")


@app.command()
def status() -> None:
    """Say what runs and where; exit code 1 when something does not."""
    records = read_records()
    alive = {name: record.process() is not None for name, record in records.items()}
    for name, record in records.items():
        print(f"{name}: {record.url} (process {record.pid}{'' if alive[name] else ', gone'})")
    if not records or not all(alive.values()):
        print("not everything is up: run `make up`")
        raise typer.Exit(1)


def ray_service(port: int, dashboard_port: int, num_cpus: int) -> Service:
    """A Ray head; its jobs start in the project's root with this environment's python first on PATH."""
    url = f"http://{HOST}:{dashboard_port}"
    token = auth_token()
    command = [str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats", "--log-color=false"]
    command += [f"--node-ip-address={HOST}", f"--port={port}", f"--num-cpus={num_cpus}"]
    command += [f"--dashboard-host={HOST}", f"--dashboard-port={dashboard_port}", "--dashboard-agent-listen-port=0"]
    environment = {
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONUNBUFFERED": "1",  # a job's progress is followed while it runs
        "AERIE_ROOT": str(ROOT),  # an uploaded job puts relative storage here
        "RAY_AUTH_MODE": "token",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's switch for a one-machine cluster: every port on loopback
    }
    headers = {"Authorization": f"Bearer {token}"}
    ports = {"RAY_PORT": port, "RAY_DASHBOARD_PORT": dashboard_port}
    return Service("ray", command, ports, environment, url, lambda: gets_200(f"{url}/api/version", headers))


def mlflow_service(port: int) -> Service:
    """An MLflow server on SQLite, with its artifacts beside the database."""
    url = f"http://{HOST}:{port}"
    command = [str(BIN / "mlflow"), "server", f"--host={HOST}", f"--port={port}", "--workers=1"]
    command += [f"--backend-store-uri=sqlite:///{STATE_FOLDER / 'mlflow.db'}"]
    command += [f"--artifacts-destination={STATE_FOLDER / 'mlflow-artifacts'}"]
    command += [f"--allowed-hosts={HOST}:*,localhost:*"]
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # no queue workers: nothing here uses them
    return Service("mlflow", command, {"MLFLOW_PORT": port}, environment, url, lambda: gets_200(f"{url}/health"))


def ensure_running(service: Service) -> None:
    """Keep a service that runs and answers; start it otherwise.

    Raises:
        LocalError: it runs on other ports, a port is taken, or it does not start.
    """
    record = read_records().get(service.name)
    if record is not None and record.process() is not None and record.ports != service.ports:
        raise LocalError(f"{service.name} runs already with {settings(record.ports)}. Fix: `make down` first")
    if record is not None and record.process() is not None and wait_for(service, record):
        print(f"up: {service.name} runs already at {service.url}")
        return
    if record is not None:
        stop(record)
        forget(service.name)
    check_ports(service)
    record = start(service)
    remember(service.name, record)
    if not wait_for(service, record):
        stop(record)
        forget(service.name)
        raise LocalError(f"{service.name} did not start. The end of {service.log}:\n{last_lines(service.log)}")
    print(f"up: {service.name} started at {service.url} (log: {service.log.relative_to(ROOT)})")


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
        time.sleep(0.3)
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
    forget_ray_address(record)
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


def forget_ray_address(record: Record) -> None:
    """Ray notes the address of the last head for `address="auto"`: take it away with its head."""
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    if note.is_file() and note.read_text().strip() == f"{HOST}:{record.ports.get('RAY_PORT')}":
        note.unlink()


def check_ports(service: Service) -> None:
    """Raises LocalError, naming the variable, when another program listens on a port of ours."""
    for variable, port in service.ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                raise LocalError(
                    f"port {port} is taken by {listener(port)}, {service.name} needs it. "
                    f"Fix: stop that program, or choose another port: make up {variable}={port + 1}"
                ) from None


def listener(port: int) -> str:
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return "another program"


def auth_token() -> str:
    """The token that Ray's clients on this machine present; made on the first call, readable by its owner only."""
    command = [str(BIN / "ray"), "get-auth-token", "--generate"]
    token = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    file = Path.home() / ".ray" / "auth_token"
    if file.is_file():
        file.chmod(0o600)  # Ray writes it with the umask's permissions
    return token


def gets_200(url: str, headers: dict[str, str] | None = None) -> bool:
    try:
        return httpx.get(url, headers=headers, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


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


def settings(ports: dict[str, int]) -> str:
    return " ".join(f"{variable}={port}" for variable, port in ports.items())


def last_lines(path: Path, count: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:])


if __name__ == "__main__":
    try:
        app()
    except LocalError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
