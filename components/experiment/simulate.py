"""How often a live experiment promotes a head that is no better, and how often one that is, by simulating it with its own code.

    python -m components.experiment.simulate

Looks are taken after every session (continuous peeking), at AL, the guardrails and the dealing, as in a live experiment. `A/A`: the challenger is the control. `shifted`: it is better in half of the sessions
and worse in the others, by --effect, so AL is the same. `gain`: its AL is larger by --effect.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from scipy.stats import binomtest

from components.config import ExperimentConfig
from components.experiment.rehearse import Case, Kind, rehearse
from components.experiment.traffic import SCENARIOS, Pool, Scenario, Synthetic, read_pool
from components.section import ConfigError

NAMES = [scenario.name.split(",")[0] for scenario in SCENARIOS]
CHUNK = 500
"""Replications at once."""


@dataclass(frozen=True)
class Row:
    scenario: str
    kind: str
    requests: int
    """The planned end."""
    replications: int
    promoted: float
    promoted_low: float
    promoted_high: float
    """95% interval of the share that was promoted (Clopper and Pearson)."""
    stopped_for_harm: float
    stopped_by_guardrail: float
    """Of them by a guardrail."""
    median_requests: float
    """At the decision."""


def simulate(case: Case, source: Synthetic | Pool, policy: ExperimentConfig, replications: int, seed: int) -> Row:
    """Runs the case's experiments; the same seed gives the same row."""
    chunks = [min(CHUNK, replications - done) for done in range(0, replications, CHUNK)]
    seeds = np.random.SeedSequence(seed).spawn(len(chunks))
    endings = [rehearse(case, source, policy, n, np.random.default_rng(s)) for n, s in zip(chunks, seeds, strict=True)]
    names = ("promoted", "harmed", "guarded", "requests")
    promoted, harmed, guarded, requests = (np.concatenate([getattr(e, name) for e in endings]) for name in names)
    interval = binomtest(int(promoted.sum()), replications).proportion_ci(method="exact")
    return Row(
        case.scenario.name, case.kind, case.requests, replications, float(promoted.mean()),
        float(interval.low), float(interval.high), float(harmed.mean()), float(guarded.mean()),
        float(np.median(requests)),
    )  # fmt: skip


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def main(
    records: Annotated[
        list[Path],
        typer.Option(
            "--records",
            help="File of real requests to draw from (JSONL, or an arm of the evaluation). Repeatable; without: made up.",
        ),
    ] = [],
    arm: Annotated[str | None, typer.Option(help="Draw from this arm's records only.")] = None,
    effect: Annotated[float, typer.Option(help="Share by which the better head's AL is larger.")] = 0.05,
    requests: Annotated[list[int], typer.Option(help="Planned end of the experiment. Repeatable.")] = [2000],
    replications: Annotated[int, typer.Option(help="Experiments a row.")] = 4000,
    alpha: Annotated[float, typer.Option(help="Chance of a wrong promotion that the policy allows.")] = 0.05,
    min_effect: Annotated[float, typer.Option(help="Relative gain in AL that is worth a change.")] = 0.02,
    session_requests: Annotated[int, typer.Option(help="Requests of one session that count.")] = 20,
    only: Annotated[list[Kind], typer.Option(help="Only this challenger. Repeatable.")] = list(Kind),
    traffic: Annotated[list[str], typer.Option(help=f"Only this traffic ({', '.join(NAMES)}). Repeatable.")] = NAMES,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    result: Annotated[Path | None, typer.Option("--json", help="Where to write the rows.")] = None,
) -> None:
    try:
        source = read_pool(records, arm) if records else Synthetic()
        scenarios = [_scenario(name) for name in traffic]
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    policy = ExperimentConfig(alpha=alpha, min_effect=min_effect, session_requests=session_requests)
    cases = [Case(scenario, kind, effect, planned) for planned in requests for scenario in scenarios for kind in only]
    rows = [simulate(case, source, policy, replications, seed) for case in cases]
    Console().print(_table(rows, policy))
    if result is not None:
        settings = {
            "source": [str(path) for path in records] or asdict(source),
            "policy": policy.model_dump(),
            "seed": seed,
        }
        result.write_text(
            json.dumps(settings | {"effect": effect, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


def _scenario(name: str) -> Scenario:
    if name not in NAMES:
        raise ConfigError("--traffic", f"there is no {name!r}", f"name one of {', '.join(NAMES)}")
    return SCENARIOS[NAMES.index(name)]


def _table(rows: Sequence[Row], policy: ExperimentConfig) -> Table:
    columns = ("traffic", "challenger", "planned", "promoted [95% interval]", "harm", "by a guardrail", "used")
    title = f"Share of the experiments with each end, looks after every session, alpha {policy.alpha:g}"
    table = Table(*columns, title=title, caption="planned, used: requests; used until the decision (median)")
    for row in rows:
        promoted = f"{row.promoted:.1%} [{row.promoted_low:.1%}, {row.promoted_high:.1%}]"
        cells = (
            promoted,
            f"{row.stopped_for_harm:.1%}",
            f"{row.stopped_by_guardrail:.1%}",
            f"{row.median_requests:.0f}",
        )
        table.add_row(row.scenario, row.kind, str(row.requests), *cells)
    return table


if __name__ == "__main__":
    app()
