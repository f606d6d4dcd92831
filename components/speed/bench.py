"""One point, measured by `vllm bench serve`: its arguments, what it wrote, and why that must not be used."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

from components.config import Settings
from components.speed.counters import Counters
from components.speed.sweep import Point

NUM_WARMUPS = 4
PERCENTILES = (50, 95, 99)
RESULT = "bench.json"


def bench_arguments(
    settings: Settings, point: Point, target: str, url: str, prompts: Path, num_prompts: int
) -> list[str]:
    """The arguments of `vllm bench serve`; everything that could change a figure is stated."""
    speed = settings.speed
    stated = {
        "backend": "openai",
        "base-url": url,
        "endpoint": "/v1/completions",
        "model": target,
        "tokenizer": target,
        "tokenizer-mode": "hf",
        "dataset-name": "custom",
        "dataset-path": prompts,
        "num-prompts": num_prompts,
        "custom-output-len": speed.output_tokens,
        "max-concurrency": point.concurrency,
        "request-rate": point.rate,
        "burstiness": 1.0,
        "seed": speed.seed,
        "temperature": 0.0,
        "top-p": speed.top_p,
        "num-warmups": NUM_WARMUPS,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "metric-percentiles": ",".join(map(str, PERCENTILES)),
        # the texts are rendered already, with the template's own special tokens
        "extra-body": json.dumps({"add_special_tokens": False}),
    }
    flags = ["skip-chat-template", "disable-shuffle", "no-oversample", "ignore-eos", "disable-tqdm"]
    flags += ["save-result", "save-detailed"]
    return [word for name, value in stated.items() for word in (f"--{name}", str(value))] + [f"--{f}" for f in flags]


def run_bench(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run `vllm bench serve` in this process, what it prints into `folder`; its JSON."""
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    given = parser.parse_args([*arguments, "--result-dir", str(folder), "--result-filename", RESULT])
    with (folder / "bench.log").open("a") as log, contextlib.redirect_stdout(log):
        main(given)
    return json.loads((folder / RESULT).read_text())


def invalid_reason(bench: Mapping[str, Any], counted: Counters, num_requests: int, output_tokens: int) -> str | None:
    """Why a point's figures must not be used; None for a valid one.

    Args:
        bench: The JSON of `vllm bench serve`.
        counted: The server's own counters over the point, warm-ups included, on a server that nobody else asks.
        num_requests: How many were to be answered.
        output_tokens: Tokens that every answer must have.
    """
    failed = [error for error in bench["errors"] if error]
    if bench["failed"] or bench["completed"] != num_requests:
        first = f" ({failed[0].strip().splitlines()[-1]})" if failed else ""
        return f"{num_requests - bench['completed']} of {num_requests} requests failed{first}"
    lengths, texts = bench["output_lens"], bench["generated_texts"]
    empty = sum(not length or not text for length, text in zip(lengths, texts, strict=True))
    if empty:
        return f"{empty} of {num_requests} answers are empty"
    short = [length for length in lengths if length != output_tokens]
    if short:
        return f"{len(short)} of {num_requests} answers have not {output_tokens} tokens, one has {short[0]}"
    return _miscount(bench, counted, output_tokens)


def _miscount(bench: Mapping[str, Any], counted: Counters, output_tokens: int) -> str | None:
    """The requests' own figures, and the warm-ups (the first prompt each time), against the server's counters."""
    lengths, prompts = bench["output_lens"], bench["input_lens"]
    sums = {
        "requests": len(lengths) + NUM_WARMUPS,
        "prompt_tokens": sum(prompts) + NUM_WARMUPS * prompts[0],
        "output_tokens": sum(lengths) + NUM_WARMUPS * output_tokens,
    }
    for name, value in sums.items():
        if getattr(counted, name) != value:
            return f"the requests sum to {value} {name.replace('_', ' ')}, the server counted {getattr(counted, name)}"
    return None
