"""Measuring one server, as a task in a process of its own: start it, check its counters, ask it at every point, end it."""

import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.config import Settings
from components.evaluation.processes import log_to_driver
from components.speed.bench import bench_arguments, invalid_reason, run_bench
from components.speed.counters import Counters, CountersReset, kv_capacity_tokens, parse_counters
from components.speed.inputs import read_keys, task_file
from components.speed.results import PointFiles, measured
from components.speed.server import Server, plain_server, serve_arguments, server_env
from components.speed.sweep import Point, Served, num_requests
from components.storage import Location

log = logging.getLogger("aerie")

CHECKED_REQUESTS, CHECKED_TOKENS = 2, 24


@dataclass(frozen=True)
class Job:
    """What every task needs to know."""

    settings: Settings
    target_path: str
    output: Location
    num_prompts: dict[str, int]
    """By task."""

    def files(self, served: Served, point: Point, repetition: int) -> PointFiles:
        return PointFiles(self.output, served, point, repetition)

    def missing(self, served: Served, wanted: Sequence[Point], repetition: int) -> tuple[Point, ...]:
        """The points that no earlier run has finished."""
        return tuple(p for p in wanted if not self.files(served, p, repetition).figures.exists())


def measure_server(job: Job, served: Served, wanted: tuple[Point, ...], repetition: int) -> None:
    """Serve the arm and write a file a point; the server's log and arguments are kept, also of one that fails.

    Raises:
        ServerFailed: it did not start, or died.
    """
    log_to_driver()
    arguments = serve_arguments(job.settings, job.target_path, served.arm)
    label = f"{served.label}-{repetition}"
    environment = {name: value for name, value in server_env(job.settings).items() if name.startswith("VLLM_")}
    description = {"arguments": arguments, "environment": environment}
    job.output.join("servers", f"{label}.json").write_bytes(json.dumps(description, indent=1).encode())
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        try:
            with plain_server(job.settings, served, arguments, place / "server.log") as server:
                problem = miscounted(server, job)
                for number, point in enumerate(wanted, 1):
                    line = _measure_point(job, server, job.files(served, point, repetition), place, problem)
                    log.info("speed: %s, %s: %s (%d of %d)", served.label, point.label, line, number, len(wanted))
        finally:
            job.output.join("servers", f"{label}.log").write_bytes((place / "server.log").read_bytes())


def _measure_point(job: Job, server: Server, files: PointFiles, place: Path, problem: str | None) -> str:
    """Measure a point and write its files; a few words of what came out."""
    settings, point = job.settings, files.point
    requests = num_requests(point, job.num_prompts[point.task])
    prompts = task_file(job.output, point.task)
    local = place / f"{point.task}.jsonl"
    local.write_bytes(prompts.read_bytes())
    before = parse_counters(server.metrics())
    bench = run_bench(bench_arguments(settings, point, job.target_path, server.url, local, requests), place)
    metrics = server.metrics()
    try:
        counted, reset = parse_counters(metrics) - before, None
    except CountersReset as error:
        counted, reset = Counters(), str(error)
    invalid = problem or reset or invalid_reason(bench, counted, requests, settings.speed.output_tokens)
    keys = read_keys(prompts)[:requests]
    files.save(measured(files, bench, counted, keys, invalid, kv_capacity_tokens(metrics)), bench)
    return f"invalid, {invalid}" if invalid else f"{bench['output_throughput']:.1f} tokens/s"


def miscounted(server: Server, job: Job) -> str | None:
    """Ask a quiet server a few times: what the replies say of themselves must sum to what it counted. None: it does."""
    task = min(job.num_prompts)
    prompts = [json.loads(line)["prompt"] for line in task_file(job.output, task).read_bytes().splitlines()]
    before = parse_counters(server.metrics())
    asked = {"model": job.target_path, "max_tokens": CHECKED_TOKENS, "temperature": 0.0}
    asked |= {"ignore_eos": True, "add_special_tokens": False}
    replies = [server.complete(prompt=prompt, **asked) for prompt in prompts[:CHECKED_REQUESTS]]
    counted = parse_counters(server.metrics()) - before
    sums = sum_replies(replies)
    return None if counted == sums else f"the replies sum to {sums}, the server counted {counted}"


def sum_replies(replies: Sequence[dict[str, Any]]) -> Counters:
    """The counters of completions, from their usage and from their own acceptance figures where they have such."""
    figures = [(reply.get("metrics") or {}).get("speculative_decoding") or {} for reply in replies]
    histograms = [f["acceptance_histogram"] for f in figures if f]
    histogram = [sum(counts) for counts in zip(*histograms, strict=True)]
    return Counters(
        requests=len(replies),
        prompt_tokens=sum(reply["usage"]["prompt_tokens"] for reply in replies),
        output_tokens=sum(reply["usage"]["completion_tokens"] for reply in replies),
        rounds=sum(f.get("num_spec_steps", 0) for f in figures),
        drafted=sum(f.get("num_draft_tokens", 0) for f in figures),
        accepted=sum(f.get("num_accepted_draft_tokens", 0) for f in figures),
        accepted_at=tuple(sum(histogram[i:]) for i in range(1, len(histogram))),
    )
