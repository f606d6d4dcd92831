"""What goes into the run that MLflow keeps: parameters, figures, curves, files and the bundle; all of it may be sent twice."""

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from components.publishing import registry
from components.publishing.bundle import BundleError, verify_bundle
from components.publishing.evidence import Evidence, curves_of, metrics_of
from components.publishing.note import note
from components.publishing.tables import KEY_SHOWN
from components.section import ConfigError
from components.tracking import Tracker, public_address

log = logging.getLogger("aerie")


def log_run(evidence: Evidence, tracker: Tracker) -> None:
    """Parameters, figures, curves and settings of the run; figures that it holds already are not sent twice."""
    settings = evidence.settings.model_dump(mode="json", exclude={"resources", "storage", "mlflow"})
    tracker.log_params(settings)
    tracker.log_curves(curves_of(evidence))
    tracker.log_curves([(0, metrics_of(evidence))])
    tracker.set_tags(
        {
            "aerie.verdict": "promote" if evidence.verdict.promote else "refuse",
            "aerie.head": evidence.head_digest[
                :KEY_SHOWN
            ],  # whole ones, in the version's tags, would hide their names on the page
            "aerie.target": evidence.target["digest"][:KEY_SHOWN],
            registry.VLLM_TAG: evidence.vllm_version,
            MLFLOW_RUN_NOTE: note(evidence),
        }
    )
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "settings.json"  # whole: a parameter holds a short value only
        path.write_text(json.dumps(settings, indent=1, sort_keys=True))
        tracker.log_artifact(path)


def send_bundle(tracker: Tracker, folder: Path, artifact_path: str) -> None:
    """Upload the bundle, read it back and check it; one that arrived whole before is kept.

    Raises:
        BundleError: what MLflow gives back is not what was sent.
    """
    if _arrived(tracker, artifact_path):
        return
    tracker.log_artifact(folder, artifact_path)
    if not _arrived(tracker, artifact_path):
        raise BundleError(f"MLflow's copy of {folder} differs from it: repeat the command")


def addresses(evidence: Evidence, tracker: Tracker, version: int) -> list[tuple[str, str]]:
    """(what, URL) of what the run left behind."""
    server = public_address(tracker.tracking_uri)
    return [
        ("MLflow run", run_page(server, tracker.experiment_id, tracker.run_id)),
        ("MLflow model", f"{server}/#/models/{evidence.settings.publish.name}/versions/{version}"),
        ("Endpoint", f"{evidence.ab['endpoint']}/v1"),
    ]


def run_page(server: str, experiment_id: str, run_id: str) -> str:
    """URL of a run, in the half of MLflow's pages that shows training; without the last part they open with traces and agents."""
    return f"{server}/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


@contextmanager
def mlflow_errors(tracking_uri: str) -> Iterator[None]:
    """Turn what MLflow refuses, or its absence, into one line that names the setting.

    Raises:
        ConfigError: instead of MLflow's and its transport's errors.
    """
    try:
        yield
    except (MlflowException, requests.RequestException) as error:
        raise ConfigError(
            "mlflow.tracking_uri",
            f"MLflow at {public_address(tracking_uri)} failed: {' '.join(str(error).split())[:300]}",
            "see that the server runs, then repeat the command: what was published is kept",
        ) from error


def _arrived(tracker: Tracker, artifact_path: str) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        if not tracker.client.list_artifacts(tracker.run_id, artifact_path):
            return False
        try:
            verify_bundle(Path(tracker.client.download_artifacts(tracker.run_id, artifact_path, scratch)))
        except BundleError as error:
            log.info("uploading the bundle again: %s", error)
            return False
    return True
