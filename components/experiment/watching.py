"""Watching an endpoint for ever: which arm its users meet, and the alarms of its windows."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from components.config import ExperimentConfig, WatchConfig
from components.experiment.acceptance import Acceptance, Recorded, Reference
from components.experiment.conduct import Health, live_weight
from components.experiment.follow import Follower
from components.experiment.watch import FIRST_WINDOW, Alarm, Figure, Watch
from components.serving.stages import CHAMPION
from components.storage import Location

log = logging.getLogger("aerie")

Clock = Callable[[], float]
"""Unix time in seconds."""
Show = Callable[[str, str, Sequence[Figure]], None]
"""(head, arm, figures)"""


def watch_endpoint(
    health: Health,
    records: Location,
    policy: ExperimentConfig,
    config: WatchConfig,
    since: float,
    expected: str | None = None,
    reference: Acceptance | None = None,
    recorded: Callable[[str], Recorded | None] = lambda head: None,
    show: Show = lambda head, arm, figures: None,
    now: Clock = time.time,
) -> Iterator[tuple[str, list[Alarm]]]:
    """Looks every `poll_s` seconds, without an end; gives (head, its alarms) at every look.

    A head's reference is what is known of it from an experiment on this very traffic, else what was recorded of its version, else its first window.

    Args:
        health: What the endpoint says of its arms.
        records: Folder of the live records.
        policy: When a session is over, and how often to look.
        config: Margins, the window's size and the level.
        since: Unix time in seconds; requests that began before are left out.
        expected: The head to watch, for as long as an arm with it takes sessions; None: the champion's arm, or the one with the most.
        reference: The AL that `expected` had in the experiment.
        recorded: What the registry says of a head, by the name that the endpoint gives it.
        show: Called when a window was tested.
        now: The clock.
    """
    follower = Follower(records, since)
    watch, watched = None, ("", "")
    while True:
        served = main_arm(health(), expected)
        if served is not None and served != watched:
            known: Reference | None = watch.reference if watch is not None and served[1] == watched[1] else None
            if served[1] == expected and known is None:
                known = reference
            if known is None:
                known = recorded(served[1])
            since = since if watch is None else now()
            watch, watched = Watch(served[0], policy, config, known), served
            compared = known.source if known is not None else FIRST_WINDOW
            log.info(
                "watch: %s (arm %s), by windows of %d sessions; AL is compared with %s: %s",
                served[1], served[0], config.sessions, compared, known or "not known yet",
            )  # fmt: skip
        alarms = []
        if watch is not None:
            tested = watch.tested
            alarms = watch.add([record for record in follower.new() if record.started_at >= since], now())
            if watch.tested is not tested:
                show(watched[1], watched[0], watch.tested)
        for alarm in alarms:
            until = f"{datetime.fromtimestamp(alarm.last_at, UTC):%Y-%m-%d %H:%M} UTC"
            log.warning(
                "watch: %s of %s is %s, it was %s; the window until %s",
                alarm.figure, watched[1], alarm.measured, alarm.reference, until,
            )  # fmt: skip
        yield watched[1], alarms
        time.sleep(policy.poll_s)


def main_arm(health: Mapping[str, Any] | None, expected: str | None = None) -> tuple[str, str] | None:
    """(arm, head) that takes sessions: with the head `expected`, else the champion's, else with the largest weight; None without one."""
    weights = {} if health is None else {name: live_weight(health, name) for name in health["arms"]}
    taking = {name: weight for name, weight in weights.items() if weight > 0}
    if health is None or not taking:
        return None
    heads = {name: str(health["arms"][name]["head"]) for name in taking}
    arm = max(taking, key=lambda name: (heads[name] == expected, name == CHAMPION, taking[name]))
    return arm, heads[arm]
