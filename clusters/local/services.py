"""The two services and what each needs to start: command, ports, environment, and how to know that it answers."""

import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil

from clusters.local.processes import ROOT, STATE_FOLDER, LocalError, Record, Service

HOST = "127.0.0.1"
BIN = Path(sys.executable).parent


def ray_service(port: int, dashboard_port: int, num_cpus: int) -> Service:
    """A Ray head; its jobs start in the project's root with this environment's python first on PATH."""
    url = f"http://{HOST}:{dashboard_port}"
    token = auth_token()
    command = [str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats", "--log-color=false"]
    command += [f"--node-ip-address={HOST}", f"--port={port}", f"--num-cpus={num_cpus}"]
    command += [f"--dashboard-host={HOST}", f"--dashboard-port={dashboard_port}", "--dashboard-agent-listen-port=0"]
    # workers on any free port: Ray's usual range is shared by all heads of a machine, and sockets would be taken twice
    command += ["--min-worker-port=0", "--max-worker-port=0"]
    environment = {
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONUNBUFFERED": "1",  # a job's progress is followed while it runs
        "COLUMNS": "140",  # a job has no terminal to ask for the width of its tables
        "AERIE_ROOT": str(ROOT),  # an uploaded job puts relative storage here
        "RAY_AUTH_MODE": "token",
        # Ray gives workers the lowest priority but four: beside its own processes an engine lost a quarter of its speed.
        "RAY_worker_niceness": os.environ.get("RAY_worker_niceness", "0"),  # noqa: SIM112 (Ray spells it so)
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's switch for a one-machine cluster: every port on loopback
    }
    ports = {"RAY_PORT": port, "RAY_DASHBOARD_PORT": dashboard_port}
    return Service("ray", command, ports, environment, url, lambda: gets_200(f"{url}/api/version", token))


def mlflow_service(port: int) -> Service:
    """An MLflow server on SQLite, with its artifacts beside the database."""
    url = f"http://{HOST}:{port}"
    command = [str(BIN / "mlflow"), "server", f"--host={HOST}", f"--port={port}", "--workers=1"]
    command += [f"--backend-store-uri=sqlite:///{STATE_FOLDER / 'mlflow.db'}"]
    command += [f"--artifacts-destination={STATE_FOLDER / 'mlflow-artifacts'}"]
    command += [f"--allowed-hosts={HOST}:*,localhost:*"]
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # no queue workers: nothing here uses them
    return Service("mlflow", command, {"MLFLOW_PORT": port}, environment, url, lambda: gets_200(f"{url}/health"))


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


def gets_200(url: str, token: str | None = None) -> bool:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def forget_ray_address(record: Record) -> None:
    """Ray notes the address of the last head for `address="auto"`: take it away with its head."""
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    if note.is_file() and note.read_text().strip() == f"{HOST}:{record.ports.get('RAY_PORT')}":
        note.unlink()
