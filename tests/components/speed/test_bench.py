"""When a point must not be used: failed and empty answers, wrong lengths, counters that do not sum up."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from components.config import Settings
from components.speed.bench import NUM_WARMUPS, bench_arguments, invalid_reason, run_bench
from components.speed.counters import Counters, CountersReset, kv_capacity_tokens, parse_counters
from components.speed.sweep import Point
from tests.components.speed.stub_server import TOKENS as STUB_TOKENS
from tests.components.speed.stub_server import stub_server

N, TOKENS, PROMPT = 6, 8, 5
COUNTED = Counters(requests=N + NUM_WARMUPS, prompt_tokens=PROMPT * (N + NUM_WARMUPS), output_tokens=TOKENS * 10)

METRICS = """
# TYPE vllm:request_success counter
vllm:request_success_total{{engine="0",finished_reason="length",model_name="m"}} {length}.0
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} 1.0
vllm:request_success_total{{engine="1",finished_reason="length",model_name="m"}} 2.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} 1.5e+03
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} 40.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.7e+09
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {length}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="1",model_name="m",position="0"}} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="1",model_name="m",position="1"}} 1.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{engine="0",{cache}}} 1.0
"""


def bench(**changes: Any) -> dict[str, Any]:
    """What `vllm bench serve` writes of six good answers."""
    good = {
        "completed": N,
        "failed": 0,
        "errors": [""] * N,
        "output_lens": [TOKENS] * N,
        "input_lens": [PROMPT] * N,
        "generated_texts": ["words"] * N,
    }
    return good | changes


def test_a_good_point_is_valid() -> None:
    assert invalid_reason(bench(), COUNTED, N, TOKENS) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"completed": 4, "failed": 2, "errors": ["", "a\nbroken pipe\n"] * 3}, "2 of 6 requests failed (broken pipe)"),
        ({"completed": 4}, "2 of 6 requests failed"),
        ({"output_lens": [TOKENS, TOKENS, 0] * 2, "generated_texts": ["a", "b", ""] * 2}, "2 of 6 answers are empty"),
        ({"generated_texts": ["a"] * 5 + [""]}, "1 of 6 answers are empty"),
        ({"output_lens": [TOKENS] * 5 + [3]}, "1 of 6 answers have not 8 tokens, one has 3"),
        ({"input_lens": [PROMPT] * 5 + [6]}, "the requests sum to 51 prompt tokens, the server counted 50"),
    ],
)
def test_what_makes_a_point_invalid(changes: dict[str, Any], reason: str) -> None:
    assert invalid_reason(bench(**changes), COUNTED, N, TOKENS) == reason


def test_a_server_that_somebody_else_asked_too_is_found_out() -> None:
    others = replace(COUNTED, requests=COUNTED.requests + 1)
    assert invalid_reason(bench(), others, N, TOKENS) == "the requests sum to 10 requests, the server counted 11"


def test_counters_are_summed_over_engines_and_never_go_back() -> None:
    cache = 'block_size="16",num_gpu_blocks="100"'
    first, second = (parse_counters(METRICS.format(length=length, cache=cache)) for length in (3, 7))

    assert (first.requests, first.output_tokens, first.rounds, first.accepted_at) == (6, 1500, 40, (4, 3))
    assert second - first == Counters(requests=4, accepted_at=(4, 0))
    with pytest.raises(CountersReset, match="went back: accepted_at"):
        replace(first, requests=second.requests) - second
    with pytest.raises(CountersReset, match="went back: requests"):
        first - second


@pytest.mark.parametrize(
    ("cache", "tokens"),
    [
        ('block_size="16",num_gpu_blocks="100"', 1600),
        ('block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="1234"', 1234),
        ('block_size="16",num_gpu_blocks="None"', None),
    ],
)
def test_capacity_is_vllms_own_figure_where_it_gives_one(cache: str, tokens: int | None) -> None:
    assert kv_capacity_tokens(METRICS.format(length=1, cache=cache)) == tokens


def test_every_setting_that_could_change_a_figure_is_stated() -> None:
    settings = Settings.model_validate({"speed": {"concurrencies": [2], "top_p": 0.9, "seed": 7, "output_tokens": 33}})

    words = bench_arguments(settings, Point("chat", 2, 0.5), "/model", "http://here", Path("/p.jsonl"), 12)

    stated = dict(itertools.pairwise(words))
    expected = {"request-rate": "0.5", "max-concurrency": "2", "top-p": "0.9", "seed": "7", "custom-output-len": "33"}
    expected |= {"temperature": "0.0", "num-warmups": "4", "num-prompts": "12", "metric-percentiles": "50,95,99"}
    assert {name: stated[f"--{name}"] for name in expected} == expected
    assert {"--ignore-eos", "--disable-shuffle", "--save-detailed"} <= set(words)
    assert "inf" in bench_arguments(settings, Point("chat", 2), "/model", "http://here", Path("/p.jsonl"), 12)


def test_a_server_that_answers_one_in_three_with_nothing_makes_the_point_invalid(
    tmp_path: Path, tiny_target: Path
) -> None:
    """`vllm bench serve` counts such an answer as a success, and the server as a fast one."""
    settings = Settings.model_validate({"speed": {"concurrencies": [1], "output_tokens": STUB_TOKENS}})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"count {i}", "key": str(i)}) + "\n" for i in range(N)))

    with stub_server(empty_every=3) as url:
        words = bench_arguments(settings, Point("chat", 1), str(tiny_target), url, prompts, N)
        written = run_bench(words, tmp_path)

    assert (written["completed"], written["failed"]) == (N, 0)
    assert invalid_reason(written, Counters(), N, STUB_TOKENS) == "2 of 6 answers are empty"
    assert "Successful requests" in (tmp_path / "bench.log").read_text()
