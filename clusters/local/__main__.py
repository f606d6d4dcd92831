"""`python -m clusters.local up|down|status`, as `make up`, `make down` and `make status` call it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from clusters.local.processes import (
    ROOT,
    STATE_FOLDER,
    LocalError,
    Service,
    forget,
    read_records,
    remember,
    start,
    stop,
    wait_for,
)
from clusters.local.services import check_ports, forget_ray_address, mlflow_service, ray_service

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, help="Start and stop the services of one machine."
)

RayPort = Annotated[int, typer.Option(envvar="RAY_PORT", help="Port of Ray's control store (GCS).")]
DashboardPort = Annotated[int, typer.Option(envvar="RAY_DASHBOARD_PORT", help="Port of the Ray dashboard and job API.")]
MlflowPort = Annotated[int, typer.Option(envvar="MLFLOW_PORT", help="Port of the MLflow server.")]
NumCpus = Annotated[int, typer.Option(envvar="RAY_NUM_CPUS", help="Logical CPUs that Ray may hand out.")]


@app.command()
def up(
    ray_port: RayPort = 6379,
    dashboard_port: DashboardPort = 8265,
    mlflow_port: MlflowPort = 5000,
    num_cpus: NumCpus = 8,
) -> None:
    """Start what is not running yet and wait until it answers."""
    STATE_FOLDER.mkdir(exist_ok=True)
    missing = []
    for service in (mlflow_service(mlflow_port), ray_service(ray_port, dashboard_port, num_cpus)):
        if is_running(service):
            print(f"up: {service.name} runs already at {service.url}")
        else:
            check_ports(service)
            missing.append(service)
    for service in missing:
        remember(service.name, start(service))
    for service in missing:
        confirm(service)


@app.command()
def down() -> None:
    """Stop what `up` started here, with all its children, and nothing else."""
    records = read_records()
    if not records:
        print("down: nothing that `make up` started here is running")
    for name, record in records.items():
        count = stop(record)
        forget_ray_address(record)
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


def is_running(service: Service) -> bool:
    """Whether the recorded process is alive and answers; one that does not is ended and forgotten.

    Raises:
        LocalError: it runs on other ports than the ones asked for.
    """
    record = read_records().get(service.name)
    if record is None:
        return False
    if record.process() is not None and record.ports != service.ports:
        raise LocalError(f"{service.name} runs already with {settings(record.ports)}. Fix: `make down` first")
    if wait_for(service, record):
        return True
    stop(record)
    forget(service.name)
    return False


def confirm(service: Service) -> None:
    """Wait until a started service answers.

    Raises:
        LocalError: it does not start; what there was of it is ended.
    """
    record = read_records()[service.name]
    if not wait_for(service, record):
        stop(record)
        forget(service.name)
        raise LocalError(f"{service.name} did not start. The end of {service.log}:\n{last_lines(service.log)}")
    print(f"up: {service.name} started at {service.url} (log: {service.log.relative_to(ROOT)})")


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
