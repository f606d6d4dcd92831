#!/usr/bin/env python
"""The data stages: prompts, the target's answers, hidden states and the draft vocabulary."""

from pathlib import Path
from typing import Annotated

import typer

from components.config import ConfigError
from components.data.verify import Verification
from components.pipeline import Selection
from components.storage import Location
from pipelines.cli import (
    DEFAULT_CONFIG,
    Cluster,
    Config,
    First,
    Forced,
    Last,
    Overrides,
    Plan,
    guarded,
    run_pipeline,
)
from pipelines.full import define_stages

Verify = Annotated[
    str | None,
    typer.Option(
        "--verify",
        help="Only check what is stored at this folder or s3:// address, one output or all below it, row by row: "
        "names every bad row; exit code 1 if there is one.",
    ),
]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def main(
    config: Config = DEFAULT_CONFIG,
    cluster: Cluster = None,
    overrides: Overrides = [],
    plan: Plan = False,
    first: First = None,
    until: Last = "vocabulary",
    forced: Forced = [],
    verify: Verify = None,
) -> None:
    if verify is not None:
        raise typer.Exit(verify_outputs(named_location(verify)))
    run_pipeline(define_stages, config, cluster, overrides, plan, Selection(first, until, tuple(forced)))


def named_location(uri: str) -> Location:
    """What an address on the command line means: a relative folder starts where the user is."""
    return Location(uri if "://" in uri else str(Path(uri).expanduser().absolute()))


def verify_outputs(root: Location) -> int:
    """Print a line for everything that is wrong below `root`, then a summary; the exit code."""
    verification = Verification(found=lambda finding: print(f"bad: {finding}", flush=True))
    try:
        verification.check(root)
    except FileNotFoundError as error:
        raise ConfigError("--verify", str(error), "name an output's folder, a stage's, or the whole storage") from None
    print(f"verified {verification.summary()}", flush=True)
    return 1 if verification.findings else 0


if __name__ == "__main__":
    guarded(app)
