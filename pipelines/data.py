#!/usr/bin/env python
"""The data stages: prompts, the target's answers, hidden states and the draft vocabulary."""

from pathlib import Path
from typing import Annotated

import typer

from components.config import Settings
from components.data.verify import Verification
from components.planning import in_units
from components.publishing.run_log import mlflow_errors
from components.retention import needed_outputs, places_in_use, remove_output, stored_outputs
from components.section import ConfigError
from components.storage import Location
from pipelines.cli import guarded, make_pipeline, run_pipeline
from pipelines.full import define_stages
from pipelines.run_options import RunOptions, with_run_options

Verify = Annotated[
    str | None,
    typer.Option(
        "--verify",
        help="Only check what is stored at this folder or s3:// address, one output or all below it, row by row: "
        "names every bad row; exit code 1 if there is one.",
    ),
]

Gc = Annotated[
    bool,
    typer.Option(
        "--gc",
        help="Only list the stored outputs that no champion, challenger or previous version of the MLflow server, no "
        "running stage and no pinned output (a file _pin in its folder, or --keep) needs, with their bytes.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="With --gc: remove what it lists.")]
Keep = Annotated[
    list[str],
    typer.Option("--keep", help="With --gc: fingerprint of an output to keep, with all it was made of. Repeatable."),
]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
@with_run_options(until="vocabulary")
def main(
    options: RunOptions,
    verify: Verify = None,
    gc: Gc = False,
    yes: Yes = False,
    keep: Keep = [],
) -> None:
    if (yes or keep) and not gc:
        raise ConfigError("--yes" if yes else "--keep", "it goes with --gc only", "add --gc")
    if gc:
        return collect_garbage(options.settings(), keep, yes)
    if verify is not None:
        raise typer.Exit(verify_outputs(named_location(verify)))
    run_pipeline(define_stages, options)


def collect_garbage(settings: Settings, keep: list[str], remove: bool) -> None:
    """Print which outputs are needed and why, and which are not; remove the latter when told."""
    pipeline = make_pipeline(define_stages(settings), settings)
    pipeline.storage.check()
    pipeline.tracker.check()
    ttl_s = settings.storage.lease_ttl_s
    outputs = stored_outputs(pipeline.storage, ttl_s)
    with mlflow_errors(settings.mlflow.tracking_uri):
        needed = needed_outputs(outputs, pipeline.tracker.client, keep)
    unneeded = [output for output in outputs if output.place not in needed]
    for output in sorted(outputs, key=lambda output: output.place):
        why = needed.get(output.place, "not needed" if output.manifest else "not needed (unfinished, nobody writes it)")
        print(f"{in_units(output.bytes, 'B'):>9}  {output.stage}/{output.fingerprint}  {why}")
    total = f"{len(unneeded)} of {len(outputs)} outputs, {in_units(sum(o.bytes for o in unneeded), 'B')}"
    if not remove:
        print(f"not needed: {total}. Nothing was removed; --gc --yes removes them", flush=True)
        return
    gone = [
        output
        for output in unneeded
        # Looked at again: removing takes a while, and a run may have begun meanwhile.
        if output.place not in places_in_use(pipeline.storage, ttl_s) and remove_output(output, ttl_s)
    ]
    print(f"removed {len(gone)} outputs, {in_units(sum(o.bytes for o in gone), 'B')}", flush=True)


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
