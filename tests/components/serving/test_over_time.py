"""AL over the time of the traffic: cumulative, per arm, with intervals where sessions suffice."""

from dataclasses import replace

import pytest

from components.evaluation.acceptance import RequestRecord, total
from components.serving.over_time import acceptance_over_time
from tests.components.evaluation.records import make_record


def sent(number: int, arm: str, accepted: int, rounds: int = 10, error: str | None = None) -> RequestRecord:
    """One a second, each takes two; two requests a session."""
    record = make_record(f"s{number // 2}", accepted, rounds, error=error)
    return replace(record, arm=arm, started_at=1000.0 + number, duration_s=2.0)


def test_each_moment_holds_all_that_had_ended_by_then() -> None:
    records = [sent(i, "challenger" if i % 2 else "champion", accepted=i) for i in range(40)]
    series = acceptance_over_time(records[::-1], num_moments=4)
    assert set(series) == {"champion", "challenger"}
    assert [moment["elapsed_s"] for moment in series["champion"]] == [11.0, 21.0, 31.0, 41.0]
    assert [moment["requests"] for moment in series["challenger"]] == [5, 10, 15, 20]
    for arm, moments in series.items():
        assert moments[-1]["al"] == total(r for r in records if r.arm == arm).acceptance_length
        assert all(m["low"] <= m["al"] <= m["high"] for m in moments)


def test_few_sessions_have_no_interval_and_an_arm_that_drafts_nothing_no_moment() -> None:
    records = [sent(0, "none", 0, rounds=0), sent(2, "challenger", 5), sent(4, "challenger", 50, error="500 x")]
    series = acceptance_over_time(records)
    assert set(series) == {"challenger"}
    assert series["challenger"][-1] == {
        "elapsed_s": 6.0,
        "requests": 2,
        "al": pytest.approx(1.5),
        "low": None,
        "high": None,
    }


def test_records_without_times_have_no_series() -> None:
    assert acceptance_over_time([make_record("s", 5, 10)]) == {}
    assert acceptance_over_time([]) == {}
