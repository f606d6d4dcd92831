"""MLflow: one run for one set of settings, one vocabulary of names, and nothing non-finite in it."""

import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from ssl import SSLContext
from typing import Any
from urllib.parse import urlsplit

import httpx
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from components.config import Settings
from components.lease import Lease, LeaseHeld
from components.section import ConfigError
from components.storage import Location

log = logging.getLogger("aerie")

RUN_KEY_TAG = "aerie.run_key"
METRICS_PER_CALL = 1000  # MLflow takes no more
LEASE_TTL_S = 60.0  # of the right to make a run
REFUSED_IN_NAMES = re.compile(r"[^\w\-. :/]", re.ASCII)
"""By MLflow, in a metric's name: families and tasks are named by users."""
PARAM_VALUE_LIMIT = 500  # characters; longer values go into an artifact


@dataclass
class Tracker:
    """The MLflow run of one set of settings: found by its key when it exists, made when the first figure comes.

    Figures sent while a stage runs are best effort (a warning when MLflow is away): publishing sends them all again.
    """

    tracking_uri: str
    experiment: str
    run_key: str
    lease: Location
    """Who holds it may make the run: MLflow itself would make one for each of several that ask at once."""
    _run_id: str | None = field(default=None, init=False)

    @classmethod
    def of(cls, settings: Settings) -> "Tracker":
        """The tracker of these settings' run; `storage.uri` must be absolute."""
        key = run_key(settings)
        lease = Location(settings.storage.uri).join("_runs", f"{key}.json")
        return cls(settings.mlflow.tracking_uri, settings.mlflow.experiment, key, lease)

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(self.tracking_uri)

    def check(self) -> None:
        """Raises ConfigError when no server answers."""
        if not self.tracking_uri.startswith("http"):
            return
        try:
            httpx.get(f"{self.tracking_uri}/health", timeout=10, verify=_certificates()).raise_for_status()
        except httpx.HTTPError as error:
            raise ConfigError(
                "mlflow.tracking_uri",
                f"no MLflow server answers at {public_address(self.tracking_uri)} ({type(error).__name__})",
                "start it with `make up`, or set the address of yours",
            ) from None

    @property
    def run_id(self) -> str:
        if self._run_id is None:
            self._run_id = (self._find() or self._create()).info.run_id
        return self._run_id

    def report(self, figures: Mapping[str, float], step: int) -> None:
        """Send figures of a running stage; never raises for MLflow's sake."""
        try:
            self.check()
            self.log_metrics(figures, step)
        except (ConfigError, MlflowException, OSError) as error:
            log.warning("MLflow did not take %s at step %d: %s", sorted(figures), step, error)

    def log_metrics(self, figures: Mapping[str, float | None], step: int = 0) -> None:
        """Log the finite figures; a missing or non-finite one is named in the log instead (it would win every "best")."""
        metrics = [Metric(name, value, _now_ms(), step) for name, value in _finite(figures).items()]
        if metrics:
            self.client.log_batch(self.run_id, metrics=metrics)

    def log_curves(self, rows: Iterable[tuple[int, Mapping[str, float | None]]]) -> None:
        """Log `(step, figures)` rows; points that are there already, from the live run or an earlier try, are left out."""
        logged = self.client.get_run(self.run_id).data.metrics
        there: dict[str, set[tuple[int, float]]] = {}
        metrics = []
        for step, figures in rows:
            for name, value in _finite(figures).items():
                if name not in there:  # most are new, and each that is asked for costs a call
                    history = self.client.get_metric_history(self.run_id, name) if name in logged else ()
                    there[name] = {(m.step, m.value) for m in history}
                if (step, value) not in there[name]:
                    metrics.append(Metric(name, value, _now_ms(), step))
        for start in range(0, len(metrics), METRICS_PER_CALL):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + METRICS_PER_CALL])

    def log_params(self, params: Mapping[str, Any]) -> None:
        rows = [Param(name, str(value)[:PARAM_VALUE_LIMIT]) for name, value in flatten(params).items()]
        for start in range(0, len(rows), 100):  # MLflow takes at most 100 a call
            self.client.log_batch(self.run_id, params=rows[start : start + 100])

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self.client.log_batch(self.run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Upload a file, or a folder with all its files, under the run's artifact path `folder`."""
        if path.is_dir():
            self.client.log_artifacts(self.run_id, str(path), folder)
        else:
            self.client.log_artifact(self.run_id, str(path), folder)

    def finish(self, status: str) -> None:
        """Close the run as `FINISHED` or `FAILED` if it is open; never raises for MLflow's sake."""
        try:
            self.check()  # answers at once, where the client would try again for a while
            for run in self._runs():
                if run.info.status == "RUNNING":
                    self.client.set_terminated(run.info.run_id, status)
        except (ConfigError, MlflowException, OSError) as error:
            log.warning("MLflow did not take the run's end (%s): %s", status, error)

    @property
    def experiment_id(self) -> str:
        found = self.client.get_experiment_by_name(self.experiment)
        if found is not None:
            return found.experiment_id
        try:
            return self.client.create_experiment(self.experiment)
        except MlflowException:  # another run was first
            return self.client.get_experiment_by_name(self.experiment).experiment_id

    def _find(self) -> Run | None:
        runs = self._runs()
        if not runs:
            return None
        self.client.update_run(runs[0].info.run_id, status="RUNNING")
        return runs[0]

    def _create(self) -> Run:
        """Make the run, or find the one that another process made meanwhile."""
        while True:
            try:
                with Lease(self.lease, LEASE_TTL_S):
                    return self._find() or self.client.create_run(
                        self.experiment_id, tags={RUN_KEY_TAG: self.run_key}, run_name=f"aerie-{self.run_key[:8]}"
                    )
            except LeaseHeld:
                time.sleep(0.1)

    def _runs(self) -> list[Run]:
        """The runs of this key, oldest first (more than one only where runs with other storages began at the same moment)."""
        return self.client.search_runs(
            [self.experiment_id],
            f"tags.`{RUN_KEY_TAG}` = '{self.run_key}'",
            order_by=["attributes.start_time ASC", "attributes.run_id ASC"],
        )


def run_key(settings: Settings) -> str:
    """What names a run in MLflow: the settings that can change a result."""
    identity = settings.model_dump(mode="json", exclude={"resources", "storage", "mlflow"})
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


@cache
def _certificates() -> SSLContext:
    """Read once: it takes longer than the server's answer, and every report asks."""
    return httpx.create_ssl_context()


def _finite(figures: Mapping[str, float | None]) -> dict[str, float]:
    finite = {name: float(v) for name, v in figures.items() if v is not None and math.isfinite(v)}
    for name in figures.keys() - finite.keys():
        log.info("%s is %s: not logged to MLflow", name, figures[name])
    return {REFUSED_IN_NAMES.sub("_", name): value for name, value in finite.items()}


def public_address(uri: str) -> str:
    """The address without a user's name and password."""
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def _now_ms() -> int:
    return int(time.time() * 1000)
