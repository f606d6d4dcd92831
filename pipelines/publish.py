#!/usr/bin/env python
"""Gate, register and, if it is better beyond doubt, promote the head; or list, verify and move what is registered.

Without a command the stages run up to `publish`. The options above stand before a command: publish.py --set publish.name=mine list.
"""

from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from components.publishing.promotion import Promotion, rollback
from components.publishing.registry import CHAMPION, Registry
from components.publishing.run_log import mlflow_errors
from components.publishing.stages import registry_of
from components.publishing.versions import find, list_versions, promote_by_hand, verify
from components.storage import Location
from pipelines.cli import guarded, installed_vllm, pipeline_app
from pipelines.full import define_stages
from pipelines.serve import AllowGap, move_endpoint

app = pipeline_app(__doc__ or "", define_stages, last="publish", has_commands=True)

MoveTraffic = Callable[[int], None]
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
def promote_command(
    context: typer.Context, which: Which, override: Override = None, allow_gap: AllowGap = False
) -> None:
    """Make a registered version the champion, in the registry and behind the endpoint; what it replaces can be rolled back to."""
    _move(context, lambda heads, mover: promote_by_hand(heads, which, override, mover), allow_gap)


@app.command("rollback")
def rollback_command(context: typer.Context, allow_gap: AllowGap = False) -> None:
    """Give traffic and champion alias back to the version that had them before; a second rollback undoes the first."""
    _move(context, rollback, allow_gap)


def _heads(context: typer.Context) -> tuple[Registry, str]:
    settings = context.obj.settings()
    return registry_of(settings, Location(settings.storage.uri)), settings.mlflow.tracking_uri


def _move(context: typer.Context, move: Callable[[Registry, MoveTraffic], Promotion], allow_gap: bool) -> None:
    """Moves the endpoint, if one is up, and then the alias; what stops in between is finished by the same command."""
    settings = context.obj.settings()
    heads = registry_of(settings, Location(settings.storage.uri))
    served: list[int] = []

    def move_traffic(version: int) -> None:
        if move_endpoint(settings, version, allow_gap):
            served.append(version)

    try:
        with mlflow_errors(settings.mlflow.tracking_uri):
            promotion = move(heads, move_traffic)
    except Exception:
        if served:
            print(f"version {served[0]} serves, but the registry does not say so yet: repeat this command", flush=True)
        raise
    before = "" if promotion.replaced is None else f", in place of version {promotion.replaced}"
    is_it = f"is the champion{before}" if promotion.moved else "is the champion already"
    traffic = "all traffic goes to it" if served else "pipelines/serve.py brings it behind the endpoint"
    print(f"{heads.name} version {promotion.version} {is_it}; {traffic}", flush=True)


if __name__ == "__main__":
    guarded(app)
