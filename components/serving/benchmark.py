"""What the router costs: added ms a request and a chunk, on a real Serve, against an arm whose own time is known.

    python -m components.serving.benchmark --json router.json

The same replica answers requests that come through the router and requests that come to it directly through Serve's proxy. A round is
one batch of `c` requests at once on each way, in turns which way goes first; rounds are the unit of the bootstrap. Records and metrics are on.
A chunk's delay runs from its leaving the arm (a stamp in its text) to its arrival at the client.
"""

import asyncio
import json
import platform
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import ray
import typer
from ray import serve
from rich.console import Console
from rich.table import Table
from scipy.stats import bootstrap

from components.serving.fast_arm import STAMP, build_fast_arm
from components.serving.router import Router
from components.serving.routing import RoutedArm, Routing

CHAT = "/v1/chat/completions"
ARM_APP, DIRECT, ROUTED = "fast-app", "/direct", "/routed"
CONCURRENCIES = (1, 8, 32)
WARM_UP_ROUNDS = 5
CONFIDENCE = 0.95
RESAMPLES = 2000
LOGICAL_CPUS = 4
_STAMP = re.compile(rf"{STAMP}(\d+);".encode())


@dataclass(frozen=True)
class Cost:
    """One figure at one concurrency, in ms: medians over rounds of the mean over a round's requests or chunks."""

    what: str
    concurrency: int
    rounds: int
    direct_ms: float
    routed_ms: float
    added_ms: float
    low_ms: float
    high_ms: float


def summarize(what: str, concurrency: int, direct_ms: Sequence[float], routed_ms: Sequence[float], seed: int) -> Cost:
    """The median added time, with a percentile bootstrap interval over paired rounds.

    Args:
        direct_ms, routed_ms: [rounds] means of each round, in the same order.
    """
    added = np.asarray(routed_ms) - np.asarray(direct_ms)
    random = np.random.default_rng(seed)
    interval = bootstrap(
        (added,), np.median, confidence_level=CONFIDENCE, n_resamples=RESAMPLES, method="percentile", rng=random
    ).confidence_interval
    return Cost(
        what,
        concurrency,
        len(added),
        float(np.median(direct_ms)),
        float(np.median(routed_ms)),
        float(np.median(added)),
        float(interval.low),
        float(interval.high),
    )


async def time_request(client: httpx.AsyncClient, way: str, body: dict[str, Any]) -> float:
    """ms of a whole request that is no stream."""
    started = time.perf_counter()
    reply = await client.post(way + CHAT, json=body)
    took_ms = (time.perf_counter() - started) * 1e3
    reply.raise_for_status()
    return took_ms


async def time_chunks(client: httpx.AsyncClient, way: str, body: dict[str, Any]) -> float:
    """Mean ms of a stream's chunks on their way; the first is left out, which waits for the headers.

    Raises:
        RuntimeError: the stream lost chunks.
    """
    delays_ms: list[float] = []
    async with client.stream("POST", way + CHAT, json={**body, "stream": True}) as reply:
        reply.raise_for_status()
        async for data in reply.aiter_raw():
            now_ns = time.monotonic_ns()
            delays_ms += [(now_ns - int(sent_ns)) / 1e6 for sent_ns in _STAMP.findall(data)]
    if len(delays_ms) != body["chunks"]:
        raise RuntimeError(f"{len(delays_ms)} of {body['chunks']} chunks came")
    return float(np.mean(delays_ms[1:]))


async def measure(
    address: str, timer: Callable[..., Any], concurrency: int, rounds: int, body: dict[str, Any]
) -> tuple[list[float], list[float]]:
    """(direct, routed): the mean of every round in ms, without the first rounds."""
    means: dict[str, list[float]] = {DIRECT: [], ROUTED: []}
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=60, trust_env=False) as client:
        for index in range(WARM_UP_ROUNDS + rounds):
            for way in (DIRECT, ROUTED) if index % 2 else (ROUTED, DIRECT):
                times = await asyncio.gather(*(timer(client, way, body) for _ in range(concurrency)))
                means[way].append(float(np.mean(times)))
    return means[DIRECT][WARM_UP_ROUNDS:], means[ROUTED][WARM_UP_ROUNDS:]


@contextmanager
def serving(records: Path) -> Iterator[str]:
    """Address of the arm and of a router in front of it, on a Ray of their own."""
    routing = Routing(
        model="fast",
        salt="s",
        arms={"fast": RoutedArm(app=ARM_APP, weight=1.0, head="none")},
        weight_epoch=1,
        records=str(records),
    )
    port = _free_port()
    ray.init(
        address="local", num_cpus=LOGICAL_CPUS, include_dashboard=False, logging_level="warning", log_to_driver=False
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        serve.run(build_fast_arm(), name=ARM_APP, route_prefix=DIRECT)
        router = Router.options(user_config=routing.model_dump(mode="json")).bind()  # type: ignore[attr-defined]
        serve.run(router, name="router-app", route_prefix=ROUTED)
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def main(
    rounds: Annotated[int, typer.Option(min=5, help="Rounds at each concurrency.")] = 60,
    chunks: Annotated[int, typer.Option(min=2, help="Chunks of a stream.")] = 20,
    pace_ms: Annotated[float, typer.Option(help="Time between the chunks of a stream.")] = 10.0,
    concurrencies: Annotated[list[int], typer.Option("--concurrency", help="Requests at once. Repeatable.")] = list(
        CONCURRENCIES
    ),
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    out: Annotated[Path | None, typer.Option("--json", help="File for the figures.")] = None,
) -> None:
    """Measure what the router adds to a request and to a chunk of a stream."""
    body = {
        "model": "fast",
        "messages": [{"role": "user", "content": "x" * 400}],
        "chunks": chunks,
        "pace_s": pace_ms / 1e3,
    }
    costs: list[Cost] = []
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as address:
        for concurrency in concurrencies:
            for what, timer in (("request", time_request), ("chunk", time_chunks)):
                direct_ms, routed_ms = asyncio.run(measure(address, timer, concurrency, rounds, body))
                costs.append(summarize(what, concurrency, direct_ms, routed_ms, seed))
    _print(costs)
    if out is not None:
        setting = {"rounds": rounds, "chunks": chunks, "pace_ms": pace_ms, "seed": seed, "confidence": CONFIDENCE}
        versions = {"python": platform.python_version(), "ray": ray.__version__}
        out.write_text(json.dumps({**setting, **versions, "costs": [asdict(cost) for cost in costs]}, indent=1) + "\n")


def _print(costs: Sequence[Cost]) -> None:
    table = Table("per", "at once", "direct, ms", "through the router, ms", f"added, ms ({CONFIDENCE:.0%} interval)")
    for cost in costs:
        added = f"{cost.added_ms:.3f} [{cost.low_ms:.3f}, {cost.high_ms:.3f}]"
        table.add_row(cost.what, str(cost.concurrency), f"{cost.direct_ms:.3f}", f"{cost.routed_ms:.3f}", added)
    Console().print(table)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    typer.run(main)
