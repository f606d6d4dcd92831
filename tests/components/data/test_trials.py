"""Which documents capture workers died of, told from what the workers began and never ended."""

import pytest

from components.data.progress import DEATHS_PER_ATTEMPT
from components.data.trials import Place, Trials
from components.data.verdict import ERROR, SILENT_DEATH, Verdict

PLACES = [Place("part-00000.parquet", row) for row in range(8)]
WORDS = Verdict(ERROR, "Traceback: no memory")
NODE, OTHER_NODE = "node", "other node"


def trials_of(max_attempts: int, num_workers: int, *dead_nodes: str) -> Trials:
    return Trials(max_attempts, num_workers, lambda node: node not in dead_nodes)


class Worker:
    """Captures all that it is asked for, again and again until it survives; notes what it was given together."""

    def __init__(self, trials: Trials, number: int, deadly: set[Place], words: Verdict | None = None) -> None:
        self.trials, self.number, self.deadly, self.words = trials, number, deadly, words
        self.given: list[list[Place]] = []
        self.lost: dict[Place, Verdict] = {}
        self.deaths = 0
        self.is_up = False

    def call(self, places: list[Place]) -> None:
        while not self.lives_through(places):
            self.deaths += 1

    def lives_through(self, places: list[Place]) -> bool:
        if not self.is_up:
            assert self.trials.start(self.number, NODE) is None
        self.is_up = True
        left = [place for place in places if place not in self.lost]
        while left:
            together, verdict = self.trials.next(self.number, left)
            self.given.append(together)
            if verdict is None and self.deadly & set(together):
                self.is_up = False
                if self.words:
                    self.trials.fail(self.number, self.words)
                return False
            if verdict:
                self.lost[together[0]] = verdict
            left = [place for place in left if place not in together]
        self.trials.next(self.number, [])
        return True


@pytest.mark.parametrize("words", [None, WORDS])
@pytest.mark.parametrize("max_attempts", [1, 3])
def test_only_deadly_documents_are_lost(max_attempts: int, words: Verdict | None) -> None:
    deadly = {PLACES[2], PLACES[6]}
    worker = Worker(trials_of(max_attempts, 1), 0, deadly, words)
    worker.call(PLACES)
    assert worker.lost == dict.fromkeys(deadly, words or SILENT_DEATH)
    assert worker.deaths == 1 + 2 * max_attempts  # all together, then each of the two alone
    tries = [given for given in worker.given if given[0] in deadly and len(given) == 1]
    assert len(tries) == 2 * (max_attempts + 1)


def test_nobody_is_alone_for_longer_than_there_is_a_doubt() -> None:
    worker = Worker(trials_of(1, 1), 0, {PLACES[0]})
    worker.call(PLACES[:4])
    worker.given.clear()
    worker.call(PLACES[1:])
    assert worker.given == [PLACES[1:]]


def test_another_workers_death_accuses_nobody_else() -> None:
    trials = trials_of(1, 2)
    other = Worker(trials, 1, {PLACES[7]})
    trials.start(0, NODE)
    assert trials.next(0, PLACES[:4]) == (PLACES[:4], None)
    other.call(PLACES[4:])
    assert trials.next(0, PLACES[:4]) == (PLACES[:4], None)
    assert other.lost.keys() == {PLACES[7]}


def test_what_was_ended_is_not_what_a_worker_died_of() -> None:
    """A worker that is killed between two calls, with its node for example."""
    trials = trials_of(1, 1)
    Worker(trials, 0, set()).call(PLACES)
    assert trials.start(0, NODE) is None
    assert trials.next(0, PLACES) == (PLACES, None)


def test_a_node_that_dies_in_the_middle_accuses_nobody() -> None:
    """Not even a document that was tried alone, which the death of a process alone would be enough to lose."""
    trials = trials_of(1, 1, NODE)
    for given in (PLACES, PLACES[:1]):
        assert trials.start(0, NODE) is None
        assert trials.next(0, given) == (given, None)
    assert trials.start(0, OTHER_NODE) is None
    assert trials.next(0, PLACES) == (PLACES, None)
    assert trials.start(0, OTHER_NODE) is None
    assert trials.next(0, PLACES) == (PLACES[:1], None), "the other node is up: one of them ended the process"


def test_workers_that_only_die_are_not_started_for_ever() -> None:
    trials = trials_of(1, 1)
    for _ in range(1 + DEATHS_PER_ATTEMPT):
        assert trials.start(0, NODE) is None
        trials.next(0, PLACES)
        trials.fail(0, WORDS)
    assert trials.start(0, NODE) == WORDS.detail
