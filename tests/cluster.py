"""A real Ray head with its dashboard for tests, on free loopback ports, ended with all its processes."""

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx
import psutil
import ray

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
LOGICAL_CPUS = 8  # Ray Data needs more to move than a small machine has cores
START_TIMEOUT_S = 120.0
FREED_TIMEOUT_S = 30.0
MARK_VARIABLE = "AERIE_TEST_CLUSTER"


@dataclass(frozen=True)
class RayHead:
    address: str
    """host:port for `ray.init` and RAY_ADDRESS."""
    dashboard_url: str
    environment: dict[str, str]
    """What a client process of this cluster (a driver, `ray job submit`) needs."""


@contextmanager
def run_ray_head(
    folder: Path, port: int, dashboard_port: int, extra: Mapping[str, str] = MappingProxyType({})
) -> Iterator[RayHead]:
    """A head that runs in the project's root until the block ends; nothing of it is left behind.

    `extra` is added to the environment of all of its workers.
    """
    mark = uuid.uuid4().hex
    # Ray notes the last head of a machine in its temporary folder, and jobs join that one: tests keep to their own
    temporary = tempfile.mkdtemp(prefix="ray-")
    environment = os.environ | {
        MARK_VARIABLE: mark,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": temporary,
        "AERIE_ROOT": str(ROOT),
        **extra,
    }
    token = subprocess.run(
        [str(BIN / "ray"), "get-auth-token", "--generate"], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
    command = [str(BIN / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}"]
    command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}", f"--num-cpus={LOGICAL_CPUS}"]
    # workers on any free port: Ray's usual range is shared by all heads of a machine, and sockets would be taken twice
    command += ["--min-worker-port=0", "--max-worker-port=0"]
    command += ["--dashboard-agent-listen-port=0", "--object-store-memory=400000000", "--include-dashboard=true"]
    log_path = folder / "ray.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    client = _client_environment(port, dashboard_port, temporary)
    head = RayHead(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}", client)
    try:
        _wait(process, head, token, log_path)
        yield head
    finally:
        _end(process, mark)
        shutil.rmtree(temporary, ignore_errors=True)


def free_cpus() -> int:
    """Logical CPUs that nobody holds, once the workers of earlier tests have ended: all, but for those that something holds on to."""
    gc.collect()  # they end with the last name for them
    deadline = time.monotonic() + FREED_TIMEOUT_S
    while (free := int(ray.available_resources().get("CPU", 0))) < LOGICAL_CPUS and time.monotonic() < deadline:
        time.sleep(0.2)
    return free


def _client_environment(port: int, dashboard_port: int, temporary: str) -> dict[str, str]:
    return {
        "RAY_TMPDIR": temporary,
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard_port}",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }


def _wait(process: subprocess.Popen[bytes], head: RayHead, token: str, log_path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(timeout=2, headers={"Authorization": f"Bearer {token}"}) as client:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if client.get(f"{head.dashboard_url}/api/version").is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.3)
    raise RuntimeError(f"the Ray head did not start:\n{log_path.read_text()[-4000:]}")


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
    left = [p for p in psutil.process_iter() if _mark_of(p) == mark]
    for p in left:
        p.kill()
    psutil.wait_procs(left, timeout=10)


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK_VARIABLE)
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return None
