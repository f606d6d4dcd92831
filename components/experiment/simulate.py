"""How often a live experiment promotes a head that is no better, and how often one that is, by simulating it with its own code.

    python -m components.experiment.simulate

Looks are taken after every session (continuous peeking). `A/A`: the challenger is the control. `shifted`: it is better in half of the sessions
and worse in the others, by --effect, so AL is the same. `gain`: its AL is larger by --effect.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from scipy.stats import binomtest

from components.config import ExperimentConfig
from components.experiment.difference import Array, Part
from components.experiment.policy import is_futile, is_gain, is_harm
from components.experiment.sequential import Plan, SequentialDifference
from components.experiment.traffic import (
    SCENARIOS,
    Pool,
    Scenario,
    Sessions,
    Synthetic,
    make_sessions,
    read_pool,
    treat,
)
from components.section import ConfigError

CHUNK = 1000
"""Replications at once."""
PACE = 0.002
"""Share of the experiment between two requests of a session."""
IDLE = 0.01
"""Share of the experiment after which a silent session is over."""


class Kind(StrEnum):
    """What the challenger is."""

    SAME = "A/A"
    SHIFTED = "shifted"
    GAIN = "gain"


@dataclass(frozen=True)
class Case:
    scenario: Scenario
    kind: Kind
    effect: float
    requests: int


@dataclass(frozen=True)
class Ending:
    """How the replications of one case ended; arrays [replications]."""

    promoted: Array
    harmed: Array
    requests: Array
    """At the decision."""


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
    median_requests: float
    """At the decision."""


def simulate(case: Case, source: Synthetic | Pool, policy: ExperimentConfig, replications: int, seed: int) -> Row:
    """Runs the case's experiments; the same seed gives the same row."""
    chunks = [min(CHUNK, replications - done) for done in range(0, replications, CHUNK)]
    seeds = np.random.SeedSequence(seed).spawn(len(chunks))
    endings = [_run(case, source, policy, n, np.random.default_rng(s)) for n, s in zip(chunks, seeds, strict=True)]
    promoted, harmed, requests = (
        np.concatenate([getattr(ending, name) for ending in endings]) for name in ("promoted", "harmed", "requests")
    )
    interval = binomtest(int(promoted.sum()), replications).proportion_ci(method="exact")
    return Row(
        case.scenario.name, case.kind, case.requests, replications, float(promoted.mean()),
        float(interval.low), float(interval.high), float(harmed.mean()), float(np.median(requests)),
    )  # fmt: skip


def _run(case: Case, source: Synthetic | Pool, policy: ExperimentConfig, n: int, rng: np.random.Generator) -> Ending:
    sessions = make_sessions(rng, (n, _num_sessions(case)), case.scenario, source, policy.session_requests)
    before = np.cumsum(sessions.requests, axis=1) - sessions.requests
    starts = before / case.requests
    begins, weights = np.array(case.scenario.weights).T
    share = weights[np.searchsorted(begins, starts, side="right") - 1]
    treated = rng.random(share.shape) < share
    rounds = np.where(treated, _treat(rng, sessions, case), sessions.rounds)
    ends = starts + PACE * sessions.requests * rng.exponential(size=share.shape) + IDLE
    order = np.argsort(np.where(starts < 1, ends, np.inf), axis=1)
    made = [np.take_along_axis(x, order, 1) for x in (sessions.task, treated, share, sessions.tokens - rounds, rounds)]
    seen = np.minimum(np.take_along_axis(ends, order, 1), 1.0) * case.requests
    return _watch(made, np.take_along_axis(starts < 1, order, 1), seen, sessions.num_tasks, case, policy)


def _watch(
    made: Sequence[Array], counts: Array, seen: Array, num_tasks: int, case: Case, policy: ExperimentConfig
) -> Ending:
    """Sessions [replications, sessions] in the order in which they are over, with a look after each and one at the end."""
    n, num_sessions = counts.shape
    watched = SequentialDifference(Plan(policy.alpha, policy.min_sessions, case.requests), num_tasks, (n,))
    sums = np.zeros((2, n))
    """Of the control: accepted, rounds."""
    promoted, harmed, open_ = np.zeros(n, bool), np.zeros(n, bool), np.ones(n, bool)
    requests = np.full(n, float(case.requests))
    for i in range(num_sessions + 1):
        last = i == num_sessions
        if not last:
            task, treated, share, accepted, rounds = (x[:, i] for x in made)
            watched.add(treated, share, [Part(task, accepted, rounds, accepted + rounds)], seen[:, i], counts[:, i])
            sums += np.where(counts[:, i] & ~treated, np.stack([accepted, rounds]), 0.0)
        bounds = watched.bounds(last)
        length = 1 + sums[0] / np.maximum(sums[1], 1)
        harm, gain = is_harm(bounds), is_gain(bounds, length, policy)
        ended = open_ & (harm | gain | is_futile(bounds, length, policy))
        promoted |= open_ & gain & ~harm
        harmed |= open_ & harm
        if not last:
            requests[ended] = seen[ended, i]
        open_ &= ~ended
    return Ending(promoted, harmed, requests)


def _treat(rng: np.random.Generator, sessions: Sessions, case: Case) -> Array:
    """Rounds of every session under the challenger."""
    if case.kind == Kind.SHIFTED:
        return sessions.rounds * (1 + case.effect * rng.choice((-1, 1), sessions.rounds.shape))
    return treat(sessions, case.effect) if case.kind == Kind.GAIN else sessions.rounds


def _num_sessions(case: Case) -> int:
    """Enough for the planned requests in nearly every replication: sessions have at least one request each, 1.5 or more on average."""
    return int(case.requests / 1.3)


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
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    result: Annotated[Path | None, typer.Option("--json", help="Where to write the rows.")] = None,
) -> None:
    try:
        source = read_pool(records, arm) if records else Synthetic()
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    policy = ExperimentConfig(alpha=alpha, min_effect=min_effect, session_requests=session_requests)
    cases = [Case(scenario, kind, effect, planned) for planned in requests for scenario in SCENARIOS for kind in only]
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


def _table(rows: Sequence[Row], policy: ExperimentConfig) -> Table:
    columns = ("traffic", "challenger", "planned", "promoted [95% interval]", "harm", "used")
    title = f"Share of the experiments with each end, looks after every session, alpha {policy.alpha:g}"
    table = Table(*columns, title=title, caption="planned, used: requests; used until the decision (median)")
    for row in rows:
        promoted = f"{row.promoted:.1%} [{row.promoted_low:.1%}, {row.promoted_high:.1%}]"
        cells = (promoted, f"{row.stopped_for_harm:.1%}", f"{row.median_requests:.0f}")
        table.add_row(row.scenario, row.kind, str(row.requests), *cells)
    return table


if __name__ == "__main__":
    app()
