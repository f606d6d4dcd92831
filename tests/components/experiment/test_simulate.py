"""The simulation is the experiment's own code on made-up or real traffic."""

import json

import numpy as np
import pytest
from scipy.stats import binom
from typer.testing import CliRunner

from components.config import ExperimentConfig
from components.experiment import rehearse
from components.experiment.rehearse import Case, Kind
from components.experiment.sequential import SequentialDifference
from components.experiment.simulate import app, simulate
from components.experiment.traffic import SCENARIOS, Synthetic, make_sessions, read_pool, treat
from components.section import ConfigError

POLICY = ExperimentConfig()
STEADY = SCENARIOS[0]


def can_err(alpha, n):
    """The most of `n` experiments, each of which errs with the chance `alpha`, that err with a chance of 1% or more."""
    return binom.ppf(0.99, n, alpha)


def test_5_percent_more_al_is_found_within_2000_requests():
    """By everything that decides; 94% in the README's simulation."""
    gain = simulate(Case(STEADY, Kind.GAIN, 0.05, 2000), Synthetic(), POLICY, 100, 0)
    assert gain.promoted >= 0.85
    assert gain.promoted_low <= gain.promoted <= gain.promoted_high
    assert gain.stopped_for_harm == 0


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_alike_arms_are_promoted_at_most_alpha(scenario):
    """Of 300 experiments; one that errs at 10% instead of 5% fails with a chance of 90%."""
    row = simulate(Case(scenario, Kind.SAME, 0.0, 400), Synthetic(), POLICY, 300, 0)
    assert row.promoted * 300 <= can_err(POLICY.alpha, 300)


def test_looks_without_a_boundary_for_all_of_them_promote_alike_arms_too_often(monkeypatch):
    """What the test above would find: a fixed 95% interval, looked at again and again."""
    monkeypatch.setattr(SequentialDifference, "bounds", lambda watched, last: watched.difference.final(0.05))
    row = simulate(Case(STEADY, Kind.SAME, 0.0, 400), Synthetic(), POLICY, 100, 0)
    assert row.promoted * 100 > can_err(POLICY.alpha, 100)


def test_a_loss_is_stopped():
    loss = simulate(Case(STEADY, Kind.GAIN, -0.15, 600), Synthetic(), POLICY, 50, 0)
    assert loss.promoted == 0
    assert loss.median_requests < 600  # as harm, or as futile before that is beyond doubt


def test_a_slow_challenger_is_stopped_by_a_guardrail(monkeypatch):
    """1.6 times the rounds, and the time."""
    monkeypatch.setattr(rehearse, "_treat", lambda rng, sessions, case: sessions.rounds * 1.6)
    slow = simulate(Case(STEADY, Kind.GAIN, 0.0, 600), Synthetic(), POLICY, 50, 0)
    assert slow.stopped_by_guardrail > 0.5


def test_the_same_seed_gives_the_same_row():
    case = Case(SCENARIOS[1], Kind.GAIN, 0.05, 100)
    rows = [simulate(case, Synthetic(), POLICY, 10, seed) for seed in (3, 3, 4)]
    assert rows[0] == rows[1] != rows[2]


def test_made_up_sessions_are_as_stated():
    rng = np.random.default_rng(0)
    sessions = make_sessions(rng, (20, 2000), SCENARIOS[0], Synthetic(), 20)
    for m in (2, 3, 5):
        assert (sessions.requests >= m).mean() == pytest.approx(m ** -SCENARIOS[0].tail, rel=0.1)
    for task, length in enumerate(Synthetic().lengths):
        mine = sessions.task == task
        assert sessions.tokens[mine].sum() / sessions.rounds[mine].sum() == pytest.approx(length, rel=0.05)
    better = treat(sessions, 0.05)
    assert sessions.rounds.sum() / better.sum() == pytest.approx(1.05, rel=0.01)
    assert (better >= sessions.tokens / (sessions.depth + 1) - 1e-9).all()


@pytest.fixture
def records(tmp_path):
    rng = np.random.default_rng(1)
    path = tmp_path / "requests.jsonl"
    rows = [
        {
            "arm": "challenger",
            "family": f"f{i % 2}",
            "rounds": 40,
            "drafted": 120,
            "accepted": int(rng.integers(5, 60)),
            "error": None,
        }
        for i in range(60)
    ]
    rows += [{"arm": "none", "family": "f0", "rounds": 0, "drafted": 0, "accepted": 0, "error": None}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command_draws_from_records_and_writes_what_it_shows(records, tmp_path):
    out = tmp_path / "rows.json"
    arguments = [
        "--records",
        str(records),
        "--replications",
        "5",
        "--requests",
        "150",
        "--traffic",
        "steady",
        "--json",
        str(out),
    ]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert {row["kind"] for row in rows} == {"A/A", "shifted", "gain"}
    assert len(rows) == 3
    assert "promoted" in result.output


def test_an_arm_of_the_evaluation_is_read_as_well(records, tmp_path):
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    evaluated = tmp_path / "candidate.json"
    evaluated.write_text(json.dumps({"answers": [{"record": row, "text": ""} for row in rows]}))
    assert read_pool([evaluated], None).tokens.tolist() == read_pool([records], None).tokens.tolist()


def test_too_few_records_are_refused(records):
    with pytest.raises(ConfigError, match="0 requests with speculation"):
        read_pool([records], "nobody")
    assert CliRunner().invoke(app, ["--records", "missing.jsonl"]).exit_code == 2
    assert CliRunner().invoke(app, ["--traffic", "none such"]).exit_code == 2
