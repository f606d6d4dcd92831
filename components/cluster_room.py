"""What stages ask of the cluster: refused before anything starts when it does not have it, and said when they wait for it.

Ray itself waits for ever, whether the resources are in use or do not exist.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.state import list_actors

from components.autoscaler import FIRST_REPORT_S, starting_nodes
from components.beside import thread_beside
from components.config import Settings, StageResources
from components.section import ConfigError

log = logging.getLogger("aerie")

PATIENCE_S = 30.0
"""An actor that is not there after this long may be waiting for resources; loading a target comes later."""
REPEAT_S = 120.0
KINDS = ("CPU", "GPU")
WITHOUT_RAY = frozenset({"target", "prompts"})
"""Stages that run where no cluster is up, too: prompts are looked at before one is."""
SHOWN = 5


class Need(NamedTuple):
    """Actors of one kind, that run at the same time."""

    setting: str
    num_actors: int
    each: Mapping[str, float]
    """Resources of an actor, by Ray's names."""

    @classmethod
    def of(cls, setting: str, resources: StageResources) -> "Need":
        return cls(setting, resources.replicas, {"CPU": resources.num_cpus, "GPU": resources.num_gpus})

    def total(self, kind: str) -> float:
        return self.num_actors * self.each.get(kind, 0)

    def __str__(self) -> str:
        actor = " and ".join(f"{self.each[kind]:g} {kind}s" for kind in KINDS if self.each.get(kind))
        return f"{self.num_actors} x {actor}"


def stage_needs(stage: str, settings: Settings) -> list[Need]:
    """What a stage runs at the same time; nothing for one that runs beside the driver."""
    resources = settings.resources
    features, train = Need.of("resources.features", resources.features), Need.of("resources.train", resources.train)
    if stage == "responses":
        return [Need.of("resources.responses", resources.responses)]
    if stage == "features":
        return [features]
    if stage == "head":
        return [features, train] if settings.data.mode == "stream" else [train]
    if stage in ("preflight", "evaluation", "speed"):  # one arm at a time
        return [Need.of("resources.evaluate", resources.evaluate)._replace(num_actors=1)]
    if stage == "ab":
        return [_arms(settings)]
    return []


def check_room(needs: Sequence[Need]) -> None:
    """Of nodes with nothing else on them; a cluster that grows by itself may get the nodes that it lacks.

    Raises:
        ConfigError: the nodes that are up cannot run these actors side by side, and nobody adds others.
    """
    try:
        check_fits(needs, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    except ConfigError as lack:
        if starting_nodes(FIRST_REPORT_S) is None:
            raise
        log.warning("%s: %s; an autoscaler is at work: it is waited for", lack.path, lack.problem)


def check_fits(needs: Sequence[Need], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raises ConfigError when nodes with these resources are too few for one need, or for all of them together."""
    for need in needs:
        if sum(_fitting(need, node) for node in nodes) < need.num_actors:
            raise ConfigError(
                need.setting,
                f"{need} do not fit in the cluster, whose nodes have {_named_nodes(nodes)}",
                f"lower {need.setting}.replicas, num_cpus or num_gpus, or start Ray with more",
            )
    for kind in KINDS:
        needed, there = sum(need.total(kind) for need in needs), sum(node.get(kind, 0) for node in nodes)
        if needed > there:
            raise ConfigError(
                "data.mode",
                f"stream needs {needed:g} {kind}s for capture and training together, the cluster has {there:g}",
                "lower resources.features.replicas or resources.train.replicas, or use data.mode=store",
            )


@contextmanager
def waiting_lines(title: str, needs: Sequence[Need], has_started: Callable[[], bool]) -> Iterator[None]:
    """Says, as long as nothing has started while the block runs, what is waited for and who has it; later, when nodes went, what they had."""

    def watch(over: threading.Event) -> None:
        wait_s = PATIENCE_S
        while not over.wait(wait_s):
            with suppress(RayError):  # the lines are a courtesy
                line = lack_line(needs) if has_started() else waiting_line(needs)
                if line:
                    log.warning("%s: %s", title, line)
            wait_s = REPEAT_S

    with thread_beside(f"{title}-waiting", watch):
        yield


def waiting_line(needs: Sequence[Need]) -> str:
    """`nothing has started yet: needs 2 x 1 CPUs and 1 GPUs; free: 6 of 8 CPUs, 0 of 2 GPUs; held: ServeReplica (2 GPUs)`.

    Then what an autoscaler does, where one is at work.
    """
    free, there = ray.available_resources(), ray.cluster_resources()
    rest = ", ".join(f"{free.get(kind, 0):g} of {there[kind]:g} {kind}s" for kind in KINDS if there.get(kind))
    return f"nothing has started yet: needs {', '.join(map(str, needs))}; free: {rest}{_holders()}{_growth()}"


def lack_line(needs: Sequence[Need]) -> str:
    """What the nodes that are up could not run, though nothing else were on them; nothing where all of it fits or a cluster adds nodes."""
    try:
        check_fits(needs, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    except ConfigError as lack:
        if starting_nodes() is None:
            return (
                f"a node has gone: {lack.problem}; what does not fit is waited for, and starts with a node that comes"
            )
    return ""


def are_up(actors: Sequence[Any]) -> Callable[[], bool]:
    """Tells whether all of these actors run."""
    ready = [actor.__ray_ready__.remote() for actor in actors]
    return lambda: len(ray.wait(ready, num_returns=len(ready), timeout=0)[0]) == len(ready)


class Started:
    """An actor that workers tell of their start."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set


def _arms(settings: Settings) -> Need:
    """The control, the challenger and the others: engines of several GPUs may spread over nodes."""
    resources, num_arms = settings.resources.ab, 2 + len(settings.ab.arms)
    workers = max(1, int(resources.num_gpus))
    each = {"CPU": resources.num_cpus / workers, "GPU": resources.num_gpus / workers}
    return Need("resources.ab", num_arms * resources.replicas * workers, each)


def _fitting(need: Need, node: Mapping[str, float]) -> int:
    """Actors that fit on an empty node."""
    return min(int(node.get(kind, 0) / amount + 1e-6) for kind, amount in need.each.items() if amount)


def _named_nodes(nodes: Iterable[Mapping[str, float]]) -> str:
    kinds = Counter(" and ".join(f"{node[kind]:g} {kind}s" for kind in KINDS if node.get(kind)) for node in nodes)
    return ", ".join(f"{number} x {node or 'nothing'}" for node, number in kinds.items())


def _holders() -> str:
    """The actors that hold most; nothing where Ray's state is not served (no dashboard)."""
    held: dict[str, Counter[str]] = {}
    with suppress(Exception):
        for actor in list_actors(filters=[("state", "=", "ALIVE")], detail=True, timeout=10):
            name = actor.name or actor.class_name
            held.setdefault(name, Counter()).update(_amounts(actor.required_resources or {}))
    most = sorted(held.items(), key=lambda item: (-item[1]["GPU"], -item[1]["CPU"], item[0]))
    lines = [
        f"{name} ({', '.join(f'{amount[kind]:g} {kind}s' for kind in KINDS if amount[kind])})"
        for name, amount in most
        if any(amount.values())
    ]
    more = ", ..." if len(lines) > SHOWN else ""
    return f"; held: {', '.join(lines[:SHOWN])}{more}" if lines else ""


def _growth() -> str:
    starting = starting_nodes()
    if starting is None:
        return ""
    nodes = ", ".join(f"{number} x {node_type}" for node_type, number in starting.items())
    return f"; the autoscaler is starting {nodes or 'no node'}"


def _amounts(required: Mapping[str, float]) -> dict[str, float]:
    """Of CPUs and GPUs; in a placement group they are required under the group's names, once for it and once for its bundle."""
    return {
        kind: max((n for name, n in required.items() if name == kind or name.startswith(f"{kind}_group_")), default=0)
        for kind in KINDS
    }
