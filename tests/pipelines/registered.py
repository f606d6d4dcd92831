"""Registering a head as a run does, without the run."""

import shutil
import tempfile
from pathlib import Path

from components.config import Settings
from components.pipeline import Selection
from components.publishing import registry
from components.publishing.bundle import head_digest, seal_bundle
from components.publishing.stages import registry_of
from components.storage import Location
from components.target.stages import target_stage
from pipelines.cli import make_pipeline


def register_head(settings: Settings, head: Path, al: float, verdict: str = "promote") -> int:
    """The number of a new version with the head in this folder, which is the challenger then."""
    pipeline = make_pipeline([target_stage(settings)], settings)
    pipeline.run(Selection())
    target = pipeline.artifacts["target"].facts
    heads = registry_of(settings, Location(settings.storage.uri))
    experiment = heads.client.get_experiment_by_name(settings.mlflow.experiment)
    where = experiment.experiment_id if experiment else heads.client.create_experiment(settings.mlflow.experiment)
    run_id = heads.client.create_run(where).info.run_id
    with tempfile.TemporaryDirectory() as scratch:
        bundle = Path(shutil.copytree(head, Path(scratch) / "bundle"))
        digest = seal_bundle(bundle)
        heads.client.log_artifacts(run_id, str(bundle), "bundle")
        tags = {
            registry.HEAD_DIGEST_TAG: head_digest(bundle),
            registry.BUNDLE_SHA256_TAG: digest,
            registry.NUM_SPECULATIVE_TOKENS_TAG: str(settings.evaluate.num_speculative_tokens),
            registry.TARGET_MODEL_TAG: target["model"],
            registry.TARGET_REVISION_TAG: str(target["revision"]),
            registry.TARGET_DIGEST_TAG: target["digest"],
            registry.AL_TAG: str(al),
            registry.VERDICT_TAG: verdict,
        }
    return int(registry.register_version(heads.client, heads.name, run_id, "bundle", tags).version)
