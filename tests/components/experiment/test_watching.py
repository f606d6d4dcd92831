"""A watch without an end: it follows what serves, goes on after an alarm, and needs no experiment."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from rich.table import Table

from components.config import ExperimentConfig, WatchConfig
from components.experiment.acceptance import Acceptance, Recorded
from components.experiment.sessions import Session
from components.experiment.table import watch_table
from components.experiment.watch import Figure
from components.experiment.watching import main_arm, watch_endpoint
from components.serving.records import encode_records
from components.storage import Location
from tests.components.experiment.records import live_traffic

POLICY = ExperimentConfig(session_idle_s=10.0, poll_s=0.001)
CONFIG = WatchConfig(sessions=100)
START = 1_800_000_000.0
"""2027-01-15."""


def told(**heads: tuple[str, float, str]):
    """What an endpoint says of its arms, each as (head, weight, state)."""
    return {"arms": {n: {"head": head, "weight": weight, "state": state} for n, (head, weight, state) in heads.items()}}


ALONE = told(champion=("v1", 1.0, "serving"))
PROMOTED = told(challenger=("v2", 1.0, "serving"), champion=("v1", 0.0, "serving"))


class Endpoint:
    """Its health, its clock, and 200 sessions at a time that ended before it."""

    def __init__(self, folder: Location, health) -> None:
        self.folder, self.said, self.now, self.num = folder, health, START, 0
        self.recorded: dict[str, Recorded] = {}
        self.sources: list[str] = []
        """References of the AL that were shown."""
        self.table = Table()

    def answer(self, **traffic) -> None:
        arm, _ = main_arm(self.said) or ("champion", "")
        made = live_traffic(np.random.default_rng(self.num), 200, share=1.0, arm=arm, assigned_arm=arm, **traffic)
        sessions = [replace(r, session=f"{self.num}-{r.session}", started_at=self.now + r.started_at) for r in made]
        self.folder.join("2027-01-15", f"{self.num}.jsonl").write_bytes(encode_records(sessions))
        self.num += 1
        self.now += 1000.0

    def watch(self, expected: str | None = None, reference: Acceptance | None = None) -> Iterator:
        return watch_endpoint(
            lambda: self.said, self.folder, POLICY, CONFIG, self.now, expected, reference,
            recorded=self.recorded.get, show=self.show, now=lambda: self.now,
        )  # fmt: skip

    def show(self, head: str, arm: str, figures: Sequence[Figure]) -> None:
        self.sources.append(figures[0].source)
        self.table = watch_table(head, arm, figures)


def looks(watch, num: int) -> list[str]:
    """The alarms of some looks, as head and figure."""
    return [f"{head} {alarm.figure}" for head, alarms in (next(watch) for _ in range(num)) for alarm in alarms]


def test_any_champion_is_watched_by_its_own_first_window_and_an_alarm_ends_nothing(tmp_path):
    endpoint = Endpoint(Location(str(tmp_path)), ALONE)
    watch = endpoint.watch()
    assert looks(watch, 1) == []
    endpoint.answer()
    assert looks(watch, 1) == []
    for _ in range(2):
        endpoint.answer(effect=-0.2)
        assert looks(watch, 1) == ["v1 acceptance length"] * 2
    endpoint.answer(slower=3.0)
    assert looks(watch, 2) == ["v1 p95 latency"] * 2
    endpoint.answer()
    assert looks(watch, 1) == []


def test_a_promoted_head_is_compared_with_its_al_in_the_experiment_whatever_its_arm_is_called(tmp_path):
    before = Session("all", "challenger", 0, live_traffic(np.random.default_rng(9), 400, share=1.0))
    reference = Acceptance.of([before], "the experiment")
    endpoint = Endpoint(Location(str(tmp_path)), PROMOTED)
    endpoint.recorded = {"v2": Recorded("version 2", 9.0, num_speculative_tokens=3)}
    watch = endpoint.watch("v2", reference)
    assert looks(watch, 1) == []
    endpoint.answer(effect=-0.2)
    assert looks(watch, 1) == ["v2 acceptance length"] * 2
    assert set(endpoint.sources) == {"the experiment"}, "it was measured on this very traffic"
    endpoint.said = told(champion=("v2", 1.0, "serving"))  # by pipelines/serve.py
    assert looks(watch, 1) == []
    endpoint.answer(effect=-0.2)
    assert looks(watch, 1) == ["v2 acceptance length"] * 2
    endpoint.said = told(champion=("v3", 1.0, "serving"))  # by pipelines/publish.py promote
    assert looks(watch, 1) == []
    endpoint.answer(effect=-0.2)
    assert looks(watch, 1) == [], "another head has another reference"
    endpoint.answer(effect=-0.4)
    assert looks(watch, 1) == ["v3 acceptance length"] * 2


def test_an_endpoint_that_does_not_answer_for_a_while_loses_no_request(tmp_path):
    endpoint = Endpoint(Location(str(tmp_path)), None)
    watch = endpoint.watch()
    assert looks(watch, 1) == []
    endpoint.said = ALONE
    endpoint.answer()
    endpoint.said = None
    endpoint.answer(effect=-0.2)
    endpoint.said = ALONE
    assert looks(watch, 1) == ["v1 acceptance length"] * 2


def test_what_is_watched_is_what_most_users_meet():
    assert main_arm(None) is None
    assert main_arm(ALONE) == ("champion", "v1")
    assert main_arm(PROMOTED) == ("challenger", "v2")
    both = told(challenger=("v2", 0.7, "serving"), champion=("v1", 0.3, "serving"))
    assert main_arm(both) == ("champion", "v1"), "the champion, as long as it answers"
    assert main_arm(both, "v2") == ("challenger", "v2")
    assert main_arm(told(champion=("v1", 1.0, "killed"), other=("v3", 0.1, "serving"))) == ("other", "v3")
    assert main_arm(told(champion=("v1", 0.0, "serving"))) is None


def test_a_champion_without_an_experiment_is_compared_with_what_its_version_was_registered_with(tmp_path):
    endpoint = Endpoint(Location(str(tmp_path)), ALONE)
    endpoint.recorded = {"v1": Recorded("version 1", 2.65, num_speculative_tokens=3)}
    watch = endpoint.watch()
    assert looks(watch, 1) == []
    endpoint.answer(effect=-0.2)
    assert looks(watch, 1) == ["v1 acceptance length"] * 2
    endpoint.said = told(champion=("v3", 1.0, "serving"))
    assert looks(watch, 1) == []
    endpoint.answer(effect=-0.2)
    assert looks(watch, 1) == [], "of it nothing was recorded"
    assert endpoint.sources == ["version 1", "the first window"]
    assert list(endpoint.table.columns[3].cells) == ["the first window"] * 2
