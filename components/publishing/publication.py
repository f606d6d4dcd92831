"""Publishing a judged head: the bundle, MLflow's run, the registered version, the traffic and, last of all, the champion alias.

Every step may be repeated: what is there and intact is kept, so a command that was killed anywhere does the rest when it is run again.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow.entities.model_registry import ModelVersion

from components.evaluation.arms import refuse_synthetic
from components.evaluation.gate import Reason, Verdict
from components.evaluation.prompts import PROMPTS
from components.evaluation.summary import chosen_place
from components.publishing import registry
from components.publishing.bundle import HEAD_FILES, seal_bundle
from components.publishing.card import model_card
from components.publishing.evidence import Evidence, verdict_json
from components.publishing.note import note
from components.publishing.outcome import ServeAlone, settle, standing_sentence, verdict_sentence
from components.publishing.plots import draw_plots
from components.publishing.provenance import licences, provenance
from components.publishing.registry import Registry
from components.publishing.report import render_report
from components.publishing.run_log import addresses, log_run, send_bundle
from components.publishing.upload import upload_bundle
from components.tracking import Tracker
from components.versions import git_commit

DIGEST_SHOWN = 16
"""Characters of a bundle's digest in its artifact path."""


@dataclass(frozen=True)
class Publication:
    """What came of it."""

    version: int
    run_id: str
    bundle_sha256: str
    bundle_uri: str | None
    aliases: tuple[str, ...]
    champion: int | None
    replaced: int | None
    """The version that the champion alias was taken from, or would have been."""
    moved: bool


def check_twin(verdict: Verdict, twin: ModelVersion | None, run_id: str) -> Verdict:
    """Refuse a head that is the champion already by another run's doing; the same run only repeats itself."""
    if twin is None or twin.run_id == run_id:
        return verdict
    reason = Reason(
        "another head than the champion", False, f"version {twin.version} is this very head", "another head"
    )
    return Verdict(False, (*verdict.reasons, reason))


def check_figures(verdict: Verdict, figures: Mapping[str, float | None], al: float | None) -> Verdict:
    """Refuse a head with a figure that is no number: NaN passes comparisons unseen, and infinity wins every "best".

    Args:
        verdict: So far.
        figures: Of the run, by name; None where one is undefined.
        al: The head's own acceptance length, which must be defined.
    """
    wrong = [f"{name} is {value}" for name, value in figures.items() if value is not None and not math.isfinite(value)]
    if al is None:
        wrong.append("the head's acceptance length is undefined")
    reason = Reason("finite figures", not wrong, "; ".join(wrong) or f"{len(figures)} figures", "no NaN, no infinity")
    return Verdict(verdict.promote and not wrong, (*verdict.reasons, reason))


def build_bundle(evidence: Evidence, folder: Path) -> str:
    """Make the bundle anew from the stages' outputs, the same bytes from the same outputs; its digest."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    artifacts = evidence.artifacts
    head = artifacts["head"].join(chosen_place(artifacts["evaluation"]))
    for name in HEAD_FILES:
        (folder / name).write_bytes(head.join(name).read_bytes())
    if evidence.settings.publish.include_prompts:
        (folder / PROMPTS).write_bytes(artifacts["evaluation"].join(PROMPTS).read_bytes())
    for stage in ("evaluation", *(["speed"] if evidence.speed else []), "ab"):
        (folder / f"{stage}.json").write_bytes(artifacts[stage].join(f"{stage}.json").read_bytes())
    (folder / "provenance.json").write_text(_json(provenance(evidence)))
    (folder / "README.md").write_text(model_card(evidence))
    return seal_bundle(folder)


def publish(
    evidence: Evidence,
    tracker: Tracker,
    heads: Registry,
    incumbent: int | None,
    serve_alone: ServeAlone,
    folder: Path,
) -> Publication:
    """Log, upload, register and, if the verdict and `publish.promote` say so, promote; the champion has all traffic then.

    Args:
        evidence: With the final verdict.
        tracker: The run that gets it all.
        heads: The registered model.
        incumbent: The version that the head was measured against.
        serve_alone: Moves the endpoint's traffic.
        folder: Local folder for `bundle/`, `plots/`, `report.html`, `verdict.json`.

    Raises:
        ChampionChanged: the champion is no longer the incumbent.
        ConfigError: MLflow or S3 cannot be reached or refuses.
        SyntheticArm: a measured arm accepted by chance.
    """
    settings = evidence.settings
    refuse_synthetic((name for name, arm in evidence.evaluation["arms"].items() if arm["synthetic"]), "the publisher")
    digest = build_bundle(evidence, folder / "bundle")
    plots = draw_plots(evidence, folder / "plots")
    (folder / "verdict.json").write_text(_json(verdict_json(evidence.verdict)))
    log_run(evidence, tracker)
    artifact_path = f"bundle/{digest[:DIGEST_SHOWN]}"
    send_bundle(tracker, folder / "bundle", artifact_path)
    uri = settings.publish.bundle_uri
    bundle_uri = upload_bundle(folder / "bundle", uri) if uri else None
    version = registry.register_version(
        heads.client, heads.name, tracker.run_id, artifact_path, version_tags(evidence, digest, tracker), note(evidence)
    )
    number = int(version.version)
    where = addresses(evidence, tracker, number)

    def log_report(*sentences: str) -> None:
        (folder / "report.html").write_text(render_report(evidence, plots, " ".join(sentences), where))
        tracker.log_artifact(folder / "report.html")

    meaning = verdict_sentence(evidence, number, incumbent)
    log_report(meaning)
    tracker.log_artifact(folder / "verdict.json")
    tracker.log_artifact(folder / "plots", "plots")
    standing = settle(evidence, heads, number, incumbent, serve_alone)
    log_report(meaning, standing_sentence(standing))
    return Publication(
        version=number,
        run_id=tracker.run_id,
        bundle_sha256=digest,
        bundle_uri=bundle_uri,
        aliases=tuple(sorted(heads.client.get_model_version(heads.name, str(number)).aliases)),
        champion=standing.champion,
        replaced=incumbent,
        moved=standing.moved,
    )


def version_tags(evidence: Evidence, bundle_sha256: str, tracker: Tracker) -> dict[str, str]:
    target, al = evidence.target, evidence.candidate["al"]
    measured = {registry.AL_TAG: str(al)} if al is not None and math.isfinite(al) else {}
    lineage = {f"{registry.LICENCE_TAG}{what}": licence for what, licence in licences(evidence).items()}
    return (
        measured
        | lineage
        | {
            registry.HEAD_DIGEST_TAG: evidence.head_digest,
            registry.BUNDLE_SHA256_TAG: bundle_sha256,
            registry.NUM_SPECULATIVE_TOKENS_TAG: str(evidence.num_speculative_tokens),
            registry.TARGET_MODEL_TAG: target["model"],
            registry.TARGET_REVISION_TAG: target["revision"],
            registry.TARGET_DIGEST_TAG: target["digest"],
            registry.VLLM_TAG: evidence.vllm_version,
            registry.DATA_DIGEST_TAG: evidence.artifacts["features"].digest,
            registry.GIT_TAG: git_commit() or "unknown",
            registry.VERDICT_TAG: "promote" if evidence.verdict.promote else "refuse",
            "aerie.run_key": tracker.run_key,
        }
    )


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
