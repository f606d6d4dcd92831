"""Plain vLLM behind its own HTTP server, started with the command of a model card, and what its counters say."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from components.evaluation.prompts import select_prompts
from components.storage import Location
from tests.engines import CPU_ENGINE_ENV

START_TIMEOUT_S = 300.0


def card_command(bundle: Path) -> list[str]:
    """The arguments after `vllm` of the card's command."""
    found = re.search(r"^vllm (serve .+)$", (bundle / "README.md").read_text(), re.MULTILINE)
    assert found, "the card has no command"
    return shlex.split(found[1])


@contextmanager
def plain_vllm(bundle: Path, port: int, log: Path) -> Iterator[str]:
    """The card's command as it is, in the bundle's folder; the server's address. (The CPU build's `vllm` command does not
    start, so its module is run instead.) `log` is a new file outside of any storage: engines may write to it after their server's end."""
    serve, model, *arguments = card_command(bundle)
    assert serve == "serve"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *arguments]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--no-enable-prefix-caching"]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=bundle, env=os.environ | CPU_ENGINE_ENV, stdout=output, stderr=output, start_new_session=True
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(timeout=5) as client:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if client.get(url).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.5)
    raise AssertionError(f"vLLM did not start:\n{log.read_text()[-4000:]}")


def served_acceptance_length(url: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
    """1 + accepted / drafts of the server's own counters over greedy answers to these prompts."""
    model = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
    before = counters(url)
    for prompt in prompts:
        body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0}
        httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status()
    drafts, accepted = (after - start for after, start in zip(counters(url), before, strict=True))
    return 1 + accepted / drafts


def counters(url: str) -> tuple[float, float]:
    """Rounds and accepted draft tokens so far."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    names = ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total")
    rounds, accepted = (
        sum(float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)) for name in names
    )
    return rounds, accepted


def held_out_prompts(responses: Location, num_prompts: int) -> list[tuple[int, ...]]:
    """The evaluation's own prompts."""
    return [prompt.prompt_ids for prompt in select_prompts(responses, num_prompts, 10**6).prompts]
