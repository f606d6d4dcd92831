"""The stages `incumbent` (the head to beat), `drafts` (what other arms draft with), `publish`, and the heads to serve."""

import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlflow.tracking import MlflowClient

from components.config import Settings
from components.evaluation.arms import check_baselines, refuse_synthetic, synthetic_arms
from components.evaluation.gate import Reason, Verdict
from components.evaluation.summary import evaluation_verdict, head_places
from components.forecast import Forecast
from components.publishing.bundle import HEAD_FILES, digest_of_sums
from components.publishing.drafts import Drafts, find_drafts, without_paths
from components.publishing.evidence import Evidence, metrics_of, verdict_json
from components.publishing.incumbent import Candidate, describe, find_described, find_incumbent, store_head
from components.publishing.outcome import ServeAlone, champion_twin
from components.publishing.publication import check_figures, check_twin, publish
from components.publishing.registry import CHALLENGER, CHAMPION, Registry
from components.publishing.run_log import mlflow_errors
from components.publishing.versions import warn_if_stale
from components.section import ConfigError
from components.speed.as_served import under_load
from components.stage import Artifact, Outcome, Output, Stage
from components.storage import Location
from components.tracking import Tracker, public_address
from components.versions import vllm_of

LEASE = "_lease.json"
JUDGED = (
    "target",
    "prompts",
    "responses",
    "features",
    "vocabulary",
    "head",
    "preflight",
    "incumbent",
    "evaluation",
    "speed",
    "ab",
)
"""Everything that the bundle, the report and the run account for."""


def incumbent_stage(settings: Settings) -> Stage:
    """Fetches the registered head that the new one must beat: `incumbent.json`, and `head/` when there is one."""

    def look_up(inputs: Mapping[str, Artifact]) -> dict[str, Any]:
        candidates = _candidates(settings, inputs)
        with mlflow_errors(settings.mlflow.tracking_uri):
            found = find_incumbent(_client(settings), settings.publish.name, candidates)
        return describe(settings.publish.name, found)

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        return _store(settings, look_up(inputs), "incumbent.json", output)

    return Stage(
        name="incumbent",
        run=run,
        config={"name": settings.publish.name},
        inputs=("target", "head"),
        extra_for=lambda inputs: {"champion": look_up(inputs)["version"]},
        check=lambda: _warn_if_stale(settings),
        plan=lambda artifacts: f"the champion of {settings.publish.name}, if there is one",
    )


def drafts_stage(settings: Settings) -> Stage:
    """Finds what `evaluate.baselines` draft with: `drafts.json`, and a folder an arm for heads of the registry."""
    baselines = settings.evaluate.baselines

    def look_up(inputs: Mapping[str, Artifact]) -> Drafts:
        with mlflow_errors(settings.mlflow.tracking_uri):
            return find_drafts(baselines, inputs["target"].facts["digest"], lambda: _client(settings))

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        drafts = look_up(inputs)
        for name, found in drafts.items():
            if "version" in found:
                with mlflow_errors(settings.mlflow.tracking_uri):
                    store_head(_client(settings), found, output.join(name))
        output.join("drafts.json").write_bytes(json.dumps(without_paths(drafts), indent=1, sort_keys=True).encode())
        return Outcome({"drafts": drafts})

    named = [f"{name} ({config.model})" for name, config in baselines.items() if config.model]
    return Stage(
        name="drafts",
        run=run,
        config={"models": {name: [arm.model, arm.revision] for name, arm in baselines.items() if arm.model}},
        inputs=("target",),
        extra_for=lambda inputs: {"found": without_paths(look_up(inputs))},
        check=lambda: check_baselines(baselines),
        plan=lambda artifacts: f"find {', '.join(named)}" if named else "nothing: no arm names a model",
    )


def champion_stage(settings: Settings, version: int | None = None) -> Stage:
    """Fetches the champion to serve, or the version that is about to become it: `champion.json` and `head/`."""
    fix = "run pipelines/full.py until a head passes the gate, or name another model"
    return _alias_stage(settings, CHAMPION, fix, version)


def challenger_stage(settings: Settings) -> Stage:
    """Fetches the latest registered head, to serve it beside the champion: `challenger.json` and `head/`."""
    return _alias_stage(settings, CHALLENGER, "run pipelines/full.py to register a head, or name another model")


def publish_stage(settings: Settings, serve_alone: ServeAlone) -> Stage:
    """Asks the gate, builds the bundle and the report, fills the MLflow run, registers and promotes; the champion has all traffic then.

    Args:
        settings: The run's.
        serve_alone: Gives a registered version, or plain decoding for None, all traffic of the endpoint.
    """

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        tracker = Tracker.of(settings)
        tracker.check()
        try:
            with mlflow_errors(settings.mlflow.tracking_uri):
                outcome = _publish(settings, inputs, output, tracker, serve_alone)
        except BaseException:
            tracker.finish("FAILED")
            raise
        tracker.finish("FINISHED")
        return outcome

    return Stage(
        name="publish",
        run=run,
        config={
            "publish": settings.publish.model_dump(mode="json"),
            "mlflow": [public_address(settings.mlflow.tracking_uri), settings.mlflow.experiment],
        },
        inputs=JUDGED,
        check=lambda: refuse_synthetic(synthetic_arms(settings.evaluate.baselines), "the publisher"),
        plan=lambda artifacts: (
            f"a version of {settings.publish.name} at {public_address(settings.mlflow.tracking_uri)}"
        ),
        forecast=lambda known, expected: Forecast(bytes=_head_bytes(known)),
    )


def registry_of(settings: Settings, storage: Location) -> Registry:
    """The registered model of these settings, its lease in `storage`."""
    name = settings.publish.name
    lease = storage.join("registry", name, LEASE)
    return Registry(_client(settings), name, lease, settings.storage.lease_ttl_s)


def _alias_stage(settings: Settings, alias: str, fix: str, version: int | None = None) -> Stage:
    """The stage of the version that holds `alias`, or will hold it."""
    which = alias if version is None else str(version)

    def look_up() -> dict[str, Any]:
        with mlflow_errors(settings.mlflow.tracking_uri):
            found = find_described(_client(settings), settings.publish.name, which)
        if found is None:
            raise ConfigError("publish.name", f"{settings.publish.name} has no {which}", fix)
        return describe(settings.publish.name, found)

    return Stage(
        name=alias,
        run=lambda inputs, output: _store(settings, look_up(), f"{alias}.json", output),
        config={"name": settings.publish.name},
        extra=lambda: {"version": look_up()["version"]},
        check=lambda: _warn_if_stale(settings) if alias == CHAMPION else None,
        plan=lambda artifacts: f"download the {alias} of {settings.publish.name}",
    )


def _publish(
    settings: Settings, inputs: Mapping[str, Artifact], output: Output, tracker: Tracker, serve_alone: ServeAlone
) -> Outcome:
    heads = registry_of(settings, Location(output.location.uri.rsplit("/", 2)[0]))
    loads = under_load(inputs["speed"].facts)
    gate = evaluation_verdict(inputs["evaluation"], settings.publish.gate, loads)
    evidence = Evidence(settings, inputs, _with_traffic(gate, inputs["ab"], settings.publish.gate.max_errors))
    verdict = check_figures(evidence.verdict, metrics_of(evidence), evidence.candidate["al"])
    verdict = check_twin(verdict, champion_twin(evidence, heads), tracker.run_id)
    evidence = Evidence(settings, inputs, verdict)
    incumbent = inputs["incumbent"].facts["version"]
    with tempfile.TemporaryDirectory() as scratch:
        publication = publish(evidence, tracker, heads, incumbent, serve_alone, Path(scratch))
        _keep(Path(scratch), output)
    return Outcome(
        {"verdict": "promote" if verdict.promote else "refuse", "name": settings.publish.name}
        | verdict_json(verdict)
        | {"head_digest": evidence.head_digest, "experiment_id": tracker.experiment_id}
        | asdict(publication)
    )


def _head_bytes(known: Mapping[str, Artifact]) -> int | None:
    """What the bundle takes, once there is a head."""
    return known["head"].manifest["bytes"] if "head" in known else None


def _with_traffic(verdict: Verdict, ab: Artifact, max_errors: int) -> Verdict:
    errors = ab.facts["errors"]
    reason = Reason("A/B traffic", errors <= max_errors, f"{errors} errors", f"at most {max_errors} errors")
    return Verdict(verdict.promote and reason.passed, (*verdict.reasons, reason))


def _warn_if_stale(settings: Settings) -> None:
    """Asked before anything runs; a server that does not answer is the stage's own error, when its turn comes."""
    with suppress(ConfigError), mlflow_errors(settings.mlflow.tracking_uri):
        warn_if_stale(_client(settings), settings.publish.name, vllm_of())


def _store(settings: Settings, description: Mapping[str, Any], file: str, output: Output) -> Outcome:
    if description["version"] is not None:
        with mlflow_errors(settings.mlflow.tracking_uri):
            store_head(_client(settings), description, output.join("head"))
    output.join(file).write_bytes(json.dumps(description, indent=1, sort_keys=True).encode())
    return Outcome(description)


def _candidates(settings: Settings, inputs: Mapping[str, Artifact]) -> list[Candidate]:
    files = inputs["head"].manifest["files"]
    digests = [
        digest_of_sums({name: files[f"{place}/{name}"]["sha256"] for name in HEAD_FILES})
        for place in head_places(inputs["head"])
    ]
    k, target = settings.evaluate.num_speculative_tokens, inputs["target"].facts["digest"]
    return [Candidate(digest, k, target) for digest in digests]


def _client(settings: Settings) -> MlflowClient:
    """A client of a server that answers; ConfigError when none does."""
    tracker = Tracker.of(settings)
    tracker.check()
    return tracker.client


def _keep(folder: Path, output: Output) -> None:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        output.join(path.relative_to(folder).as_posix()).write_bytes(path.read_bytes())
