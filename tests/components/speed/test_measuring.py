"""One real server under `vllm bench serve`: an n-gram arm on a target that walks a cycle, so that what it accepts is known.

It has a schedule of its K, which changes nothing of how it is measured.
"""

import json
import os
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from components.evaluation.arms import Arm
from components.speed.counters import Counters
from components.speed.dynamic import dynamic_server
from components.speed.inputs import task_file, write_inputs
from components.speed.loads import load_all
from components.speed.measuring import CHECKED_REQUESTS, Job, measure_server, miscounted, sum_replies
from components.speed.server import MODULE, Server
from components.speed.sweep import points
from components.storage import Location
from tests.components.evaluation.artifacts import tiny_settings
from tests.components.speed.test_inputs import held_out

K, TOKENS = 2, 96
FAMILIES = ["explanation", "rewriting"]
NUM_PROMPTS = 6
DRAFTS = {
    "num_spec_steps": 4,
    "num_draft_tokens": 8,
    "num_accepted_draft_tokens": 4,
    "acceptance_histogram": [1, 2, 1],
}
SERVED = dynamic_server(
    Arm("ngram", "ngram", K, options={"prompt_lookup_min": 2, "prompt_lookup_max": 3}), {1: K, 3: 1}
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, permutation_target: tuple[Path, list[int]]) -> Job:
    folder, target = tmp_path_factory.mktemp("speed"), permutation_target[0]
    settings = tiny_settings(
        target, speed={"concurrencies": [1, 3], "output_tokens": TOKENS, "request_rate": 40.0, "repetitions": 1}
    )
    output = Location(str(folder / "output"))
    tasks = write_inputs(settings, str(target), held_out(target, folder, FAMILIES), output)
    job = Job(settings, str(target), output, {name: task["num_prompts"] for name, task in tasks.items()})
    measure_server(job, SERVED, points(["chat"], settings.speed), 0)
    return job


def test_every_point_is_valid_so_that_all_counts_agree_exactly(job: Job) -> None:
    loads = load_all(job.files(SERVED, point, 0) for point in points(["chat"], job.settings.speed))

    assert [(load.point.concurrency, load.point.request_rate, load.invalid) for load in loads] == [
        (1, None, None),
        (3, None, None),
        (3, 40.0, None),
    ]
    for load in loads:
        assert (load.total("completed"), load.total("output_tokens")) == (NUM_PROMPTS, NUM_PROMPTS * TOKENS)
        assert load.tokens_per_s is not None
        assert load.tokens_per_s > 0
        assert load.latencies["ttft_ms"]["p50"] <= load.latencies["ttft_ms"]["p99"]
        assert set(load.latencies) == {"ttft_ms", "tpot_ms", "itl_ms"}


def test_acceptance_is_that_of_a_cycle(job: Job) -> None:
    """After one turn of 31 ids every draft is right: AL is K + 1 but where an answer ends within a round."""
    [load] = load_all([job.files(SERVED, points(["chat"], job.settings.speed)[0], 0)])

    assert load.al == pytest.approx(K + 1, abs=0.1)
    assert load.accepted_at == pytest.approx([1.0] * K, abs=0.05)
    assert load.total("accepted") == pytest.approx(sum(load.accepted_at) * load.total("rounds"))
    assert load.total("drafted") == K * load.total("rounds")


def test_the_schedule_lowers_k_where_more_requests_run(job: Job) -> None:
    """K is 1 while two or three requests run, and K again for the last one of a run."""
    [load] = load_all([job.files(SERVED, points(["chat"], job.settings.speed)[1], 0)])

    assert load.point.concurrency == 3
    assert load.total("rounds") <= load.total("drafted") < 1.5 * load.total("rounds")
    assert 1.9 < load.al < 2.5


def test_what_a_figure_depends_on_is_kept(job: Job) -> None:
    [load] = load_all([job.files(SERVED, points(["chat"], job.settings.speed)[0], 0)])
    served = json.loads(job.output.join("servers", f"{SERVED.label}-0.json").read_bytes())
    said = job.output.join("servers", f"{SERVED.label}-0.log").read_bytes().decode()
    bench = job.files(SERVED, load.point, 0).load_bench()

    assert "--no-enable-prefix-caching" in served["arguments"]
    assert served["environment"]["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert load.repetitions[0].kv_capacity_tokens is not None
    assert f"{load.repetitions[0].kv_capacity_tokens:,} tokens" in said
    assert (bench["max_concurrency"], bench["request_rate"]) == (1, "inf")
    assert len(bench["itls"]) == NUM_PROMPTS


def test_nothing_is_left_to_do_and_nothing_is_left_running(job: Job) -> None:
    assert job.missing(SERVED, points(["chat"], job.settings.speed), 0) == ()
    children = {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)}
    left = [
        p for p in psutil.process_iter(["cmdline"]) if p.pid in children and MODULE in " ".join(p.info["cmdline"] or [])
    ]
    assert left == []


def test_replies_are_summed_with_their_own_acceptance() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 9}
    replies = [{"usage": usage, "metrics": {"speculative_decoding": DRAFTS}}, {"usage": usage, "metrics": None}]

    assert sum_replies(replies) == Counters(
        requests=2, prompt_tokens=10, output_tokens=18, rounds=4, drafted=8, accepted=4, accepted_at=(3, 1)
    )


class Asked:
    """What `miscounted` asks: a server that counted `accepted_at` rounds by position over the replies."""

    def __init__(self, *accepted_at: int) -> None:
        counted = {
            "request_success": CHECKED_REQUESTS,
            "prompt_tokens": 5 * CHECKED_REQUESTS,
            "generation_tokens": 9 * CHECKED_REQUESTS,
            "spec_decode_num_drafts": 4 * CHECKED_REQUESTS,
            "spec_decode_num_draft_tokens": 8 * CHECKED_REQUESTS,
            "spec_decode_num_accepted_tokens": 4 * CHECKED_REQUESTS,
        }
        at = {f'spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}': n for i, n in enumerate(accepted_at)}
        lines = {f"{name}_total": value for name, value in counted.items()} | at
        self._texts = ["", "".join(f"vllm:{name} {value}\n" for name, value in lines.items())]

    def metrics(self) -> str:
        return self._texts.pop(0)

    def complete(self, **body: Any) -> dict[str, Any]:
        usage = {"prompt_tokens": 5, "completion_tokens": 9}
        return {"usage": usage, "metrics": {"speculative_decoding": DRAFTS}}


def test_a_server_that_counts_otherwise_than_its_replies_is_found_out(tmp_path: Path, tiny_target: Path) -> None:
    job = Job(tiny_settings(tiny_target), str(tiny_target), Location(str(tmp_path)), {"chat": 3})
    task_file(job.output, "chat").write_bytes(b'{"prompt": "a", "key": "a"}\n' * 3)

    assert miscounted(cast(Server, Asked(6, 2)), job) is None
    problem = miscounted(cast(Server, Asked(5, 3)), job)  # the sums agree, not the positions
    assert problem is not None
    assert "accepted_at=(6, 2)), the server counted" in problem
