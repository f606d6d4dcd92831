"""`make up` and `make down` as a user meets them: idempotent, on loopback only, with Serve on top, and nothing left behind."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import free_port, is_running

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PORTS = ("RAY_PORT", "RAY_DASHBOARD_PORT", "MLFLOW_PORT")
JOB = """#!/usr/bin/env python
import os, sys
import ray
from ray import serve

@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Echo:
    async def __call__(self, request):
        return "served"

ray.init(address="auto")
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(Echo.bind())
print("root", os.environ["AERIE_ROOT"], "python", sys.executable, "folder", os.getcwd())
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A folder that looks like the project to clusters/local; what it started is stopped."""
    shutil.copytree(ROOT / "clusters" / "local", tmp_path / "clusters" / "local")
    job = tmp_path / "job.py"
    job.write_text(JOB)
    job.chmod(0o755)
    yield tmp_path
    local(tmp_path, "down")


@pytest.fixture
def ports() -> Iterator[dict[str, str]]:
    """Free ports, and a folder of its own for Ray, which notes there the last head that jobs join."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # short: it holds sockets
        yield {name: str(free_port()) for name in PORTS} | {"RAY_TMPDIR": folder}


def local(project: Path, command: str, ports: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clusters.local", command],
        capture_output=True,
        text=True,
        cwd=project,
        env=os.environ | (ports or {}),
        timeout=300,
    )


def submit(project: Path, ports: dict[str, str], *entrypoint: str) -> subprocess.CompletedProcess[str]:
    """`ray job submit` in a shell that has nothing but the address: `make env` gave this environment's Ray the rest."""
    return subprocess.run(
        [BIN / "ray", "job", "submit", "--", *entrypoint],
        capture_output=True,
        text=True,
        cwd=project,
        env={"HOME": os.environ["HOME"], "PATH": os.environ["PATH"], "RAY_ADDRESS": f"127.0.0.1:{ports['RAY_PORT']}"},
        timeout=240,
    )


def started_processes(project: Path) -> list[psutil.Process]:
    """All processes whose environment carries a mark from the project's record."""
    marks = {record["mark"] for record in json.loads((project / ".aerie" / "local.json").read_text()).values()}
    return [process for process in psutil.process_iter() if environment(process).get("AERIE_SERVICE") in marks]


def environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return {}


def open_to_others(processes: list[psutil.Process]) -> set[str]:
    """Names of the processes that listen on another address than loopback."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # Ray ends workers of a job that is over
            listening = [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            if set(listening) - {"127.0.0.1", "::1", "::ffff:127.0.0.1"}:
                found.add(process.name())
    return found


def test_up_twice_then_a_job_with_serve_then_down(project: Path, ports: dict[str, str]) -> None:
    first = local(project, "up", ports)
    assert first.returncode == 0, first.stdout + first.stderr
    pids = {record["pid"] for record in json.loads((project / ".aerie" / "local.json").read_text()).values()}
    second = local(project, "up", ports)
    assert second.stdout.count("runs already") == 2
    assert pids == {record["pid"] for record in json.loads((project / ".aerie" / "local.json").read_text()).values()}

    serve_port = free_port()
    submitted = submit(project, ports, "./job.py", str(serve_port))
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert f"root {project} python {sys.executable} folder {project}" in submitted.stdout
    assert httpx.get(f"http://127.0.0.1:{serve_port}/", trust_env=False, timeout=60).text == "served"

    assert submit(project, ports, "false").returncode == 1

    processes = started_processes(project)
    # Ray writes the address of a Serve replica's gRPC port ("[::]:0") into its code; the token guards it (SECURITY.md).
    assert all(name.startswith("ray::ServeRepli") for name in open_to_others(processes))
    jobs = f"http://127.0.0.1:{ports['RAY_DASHBOARD_PORT']}/api/jobs/"
    unauthorized = httpx.get(jobs, trust_env=False, timeout=60)
    assert unauthorized.status_code == 401

    stopped = local(project, "down")
    assert stopped.returncode == 0
    assert not [process for process in processes if process.is_running() and is_running(process.pid)]
    assert "nothing" in local(project, "down").stdout


def test_a_taken_port_is_named_with_the_variable_that_changes_it(project: Path, ports: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", int(ports["MLFLOW_PORT"]))):
        result = local(project, "up", ports)
    assert result.returncode == 2
    assert f"port {ports['MLFLOW_PORT']} is taken by" in result.stderr
    assert "make up MLFLOW_PORT=" in result.stderr
    assert "Traceback" not in result.stderr
