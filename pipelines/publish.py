#!/usr/bin/env python
"""Gate, register and, if it is better beyond doubt, promote the head; or list, verify and move what is registered.

Without a command the stages run up to `publish`. The options above stand before a command: publish.py --set publish.name=mine list.
"""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from components.publishing.registry import CHAMPION, Promotion, Registry, rollback
from components.publishing.run_log import mlflow_errors
from components.publishing.stages import registry_of
from components.publishing.versions import find, list_versions, promote_by_hand, verify
from components.storage import Location
from pipelines.cli import guarded, installed_vllm, pipeline_app
from pipelines.full import define_stages

app = pipeline_app(__doc__ or "", define_stages, last="publish", has_commands=True)

Which = Annotated[str, typer.Argument(metavar="VERSION", help="Number or alias (champion, challenger, previous).")]
Override = Annotated[
    str | None, typer.Option("--override", help="Why a version that the gate refused may serve; kept with the version.")
]


@app.command("list")
def list_command(context: typer.Context) -> None:
    """Every registered version: aliases, the gate's verdict, AL, and whether it was measured on the installed vLLM."""
    heads, uri = _heads(context)
    with mlflow_errors(uri):
        rows = list_versions(heads.client, heads.name, installed_vllm())
    if not rows:
        print(f"{heads.name} has no version yet: run pipelines/full.py")
        return
    table = Table("version", "aliases", "verdict", "K", "AL", "vLLM", "head", "registered", title=heads.name)
    for row in rows:
        al = "–" if row.al is None else f"{row.al:.3f}"
        vllm = f"{row.vllm} (stale)" if row.is_stale else row.vllm
        table.add_row(
            str(row.version), "\n".join(row.aliases), row.verdict, row.num_speculative_tokens, al, vllm,
            row.head_digest[:12], f"{row.created_at:%Y-%m-%d}",
        )  # fmt: skip
    Console().print(table)


@app.command("verify")
def verify_command(context: typer.Context, which: Which = CHAMPION) -> None:
    """Download a version's bundle and check every file against its checksums and tags."""
    heads, uri = _heads(context)
    with mlflow_errors(uri):
        version = find(heads.client, heads.name, which)
        verify(heads.client, version)
    print(f"{heads.name} version {version.version}: every file is what was registered")


@app.command("promote")
def promote_command(context: typer.Context, which: Which, override: Override = None) -> None:
    """Make a registered version the champion; its files are verified first, and what it replaces can be rolled back to."""
    heads, uri = _heads(context)
    with mlflow_errors(uri):
        _say(heads, promote_by_hand(heads, which, override))


@app.command("rollback")
def rollback_command(context: typer.Context) -> None:
    """Give the champion alias back to the version that held it before; a second rollback undoes the first."""
    heads, uri = _heads(context)
    with mlflow_errors(uri):
        _say(heads, rollback(heads))


def _heads(context: typer.Context) -> tuple[Registry, str]:
    settings = context.obj.settings()
    return registry_of(settings, Location(settings.storage.uri)), settings.mlflow.tracking_uri


def _say(heads: Registry, promotion: Promotion) -> None:
    if not promotion.moved:
        print(f"{heads.name} version {promotion.version} is the champion already")
        return
    before = "" if promotion.replaced is None else f", in place of version {promotion.replaced}"
    print(f"{heads.name} version {promotion.version} is the champion{before}")
    print("What serves now stays until `pipelines/serve.py` runs: it brings the champion behind the endpoint.")


if __name__ == "__main__":
    guarded(app)
