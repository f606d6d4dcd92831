"""The end of a job: what was measured, what the gate says, where to look."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from rich.console import Console
from rich.table import Table as RichTable

from components.evaluation.gate import Reason, Verdict
from components.experiment.conduct import ask_health, live_weight
from components.pipeline import Pipeline
from components.publishing import tables
from components.publishing.diagnosis import NOTHING, diagnose_outputs, diagnosis_tables
from components.publishing.evidence import Evidence
from components.publishing.registry import CHAMPION, find_version, holder
from components.publishing.run_log import mlflow_errors, run_page
from components.publishing.tables import Table
from components.section import ConfigError
from components.stage import Artifact
from components.tracking import public_address

LOG_WIDTH = 120
"""Columns where the output is a job's log and no terminal says its width."""


def print_summary(pipeline: Pipeline, console: Console | None = None) -> None:
    """Print the results of a finished job from its manifests, the same when a run found everything done; and who is champion and serves now."""
    console = console or wide_console()
    publish = pipeline.artifacts.get("publish")
    if publish is None:
        done = ", ".join(pipeline.artifacts)
        console.print(f"Done up to here: {done}. The verdict comes with the stage publish.")
        return
    evidence = Evidence(pipeline.settings, pipeline.artifacts, stored_verdict(publish))
    evaluation, ab = tables.arms_table(evidence.evaluation), tables.ab_table(evidence.ab)
    for table in (evaluation, ab, tables.verdict_table(evidence.verdict)):
        console.print(rich_table(table))
    with mlflow_errors(pipeline.settings.mlflow.tracking_uri):
        client, name = pipeline.tracker.client, publish.facts["name"]
        version, champion = find_version(client, name, publish.facts["version"]), holder(client, name, CHAMPION)
    console.print(f"[bold]{verdict_line(publish, version.aliases if version else (), champion)}[/bold]")
    if not pipeline.made:
        console.print("Everything was done already; nothing was written.")
    _print_addresses(console, _addresses(pipeline, publish, is_there=version is not None))


def print_diagnosis(pipeline: Pipeline, console: Console | None = None) -> None:
    """Print the likely causes of what is wrong with the finished evaluation of these settings; starts nothing.

    Raises:
        ConfigError: there is none.
    """
    artifacts = pipeline.finished()
    if "evaluation" not in artifacts:
        missing = next(stage.name for stage in pipeline.stages if stage.name not in artifacts)
        raise ConfigError(
            "--diagnose",
            f"there is no finished evaluation with these settings in {pipeline.storage.uri} ({missing} is the first that is missing)",
            "run pipelines/evaluate.py with the same settings first",
        )
    console = console or wide_console()
    findings = diagnose_outputs(artifacts, pipeline.settings)
    for table in diagnosis_tables(findings):
        console.print(rich_table(table, show_lines=True))
    if not findings:
        console.print(NOTHING)


def stored_verdict(publish: Artifact) -> Verdict:
    """The verdict that a finished `publish` output holds."""
    facts = publish.facts
    return Verdict(facts["promote"], tuple(Reason(**reason) for reason in facts["reasons"]))


def verdict_line(publish: Artifact, aliases: Sequence[str], champion: int | None) -> str:
    """One sentence: the verdict, and where the version stands in the registry now."""
    facts = publish.facts
    failed = ", ".join(reason.check for reason in stored_verdict(publish).failures)
    now = "none" if champion is None else f"version {champion}"
    said = "promote" if facts["promote"] else f"refused ({failed})"
    held = ", ".join(sorted(aliases)) or "no alias"
    return f"Verdict: {said}. {facts['name']} version {facts['version']}: {held}; champion: {now}."


def _addresses(pipeline: Pipeline, publish: Artifact, is_there: bool) -> list[tuple[str, str]]:
    facts, server = publish.facts, public_address(pipeline.settings.mlflow.tracking_uri)
    gone = "" if is_there else " (no longer there: publish it again with --force publish)"  # MLflow was emptied since
    found = [
        ("MLflow", server),
        ("  this run", run_page(server, facts["experiment_id"], facts["run_id"])),
        ("  this head", f"{server}/#/models/{facts['name']}/versions/{facts['version']}{gone}"),
        ("Ray dashboard", _dashboard()),
        ("Endpoint", _endpoint(pipeline)),
        ("Report", publish.join("report.html").uri),
        ("Bundle", publish.join("bundle").uri),
    ]
    return [*found, ("  on S3", facts["bundle_uri"])] if facts["bundle_uri"] else found


def _dashboard() -> str:
    if not ray.is_initialized():  # nothing had to run, so nothing connected
        return "http://127.0.0.1:8265 unless `ray start` said otherwise"
    return f"http://{ray.init(ignore_reinit_error=True, logging_level='warning').dashboard_url}"


def _endpoint(pipeline: Pipeline) -> str:
    """Its address, and who has its traffic at this moment."""
    address = pipeline.artifacts["ab"].facts["endpoint"]
    health = ask_health(address)
    if health is None:
        off = (
            "ab.keep_serving is off"
            if not pipeline.settings.ab.keep_serving
            else "pipelines/serve.py brings the champion up"
        )
        return f"{address}/v1 (nothing answers there: {off})"
    return f"{address}/v1 ({traffic(health)})"


def traffic(health: Mapping[str, Any]) -> str:
    """Which arms get new sessions, by what `/health` says: `all traffic to champion v2-0123abcd`."""
    weights = {name: live_weight(health, name) for name in health["arms"]}
    shown = {
        name if (head := health["arms"][name]["head"]) == name else f"{name} {head}": weight / sum(weights.values())
        for name, weight in weights.items()
        if weight > 0
    }
    if len(shown) == 1:
        return f"all traffic to {next(iter(shown))}"
    return ", ".join(f"{share:.0%} to {name}" for name, share in shown.items()) or "no arm takes sessions"


def wide_console() -> Console:
    """The terminal, or a log as wide as tables need."""
    return Console(width=None if sys.stdout.isatty() else LOG_WIDTH)


def rich_table(table: Table, show_lines: bool = False) -> RichTable:
    """For a terminal; `show_lines` draws a line between rows whose cells have several lines."""
    printed = RichTable(
        *table.headers,
        title=table.title,
        title_justify="left",
        caption=table.note,
        caption_justify="left",
        show_lines=show_lines,
    )
    for row in table.rows:
        printed.add_row(*row)
    return printed


def _print_addresses(console: Console, addresses: Sequence[tuple[str, str]]) -> None:
    grid = RichTable.grid(padding=(0, 2))
    for what, address in addresses:
        grid.add_row(what, address)
    console.print(grid, soft_wrap=True)
