"""How fast this machine's CPUs run the target, from forward passes of its own that are short enough for a plan."""

import time
from pathlib import Path

from components.forecast import target_parameters
from components.stage import Artifact
from components.target.resolve import BUNDLED_PREFIX
from components.target.stages import target_path

LARGEST_BYTES = 1_000_000_000
"""Of weights: loading more, and running it, takes longer than a plan may."""
NUM_TOKENS = 128


def target_operations_per_s(target: Artifact, dtype: str, seconds: float, num_threads: int) -> float | None:
    """Floating-point operations per second of the target's matrix products in bare forward passes (no cache, no lm_head).

    Args:
        target: A finished output of the stage.
        dtype: Of its weights.
        seconds: How long to go on with each number of threads, after a first pass that does not count.
        num_threads: Of torch; one alone is tried, too.

    Returns:
        That of the fastest pass, as other work on the machine only slows them; None where the target is not on this
        machine, or too large.
    """
    if target.facts["model"].startswith(BUNDLED_PREFIX) and not target.location.is_local:
        return None
    path = target_path(target)
    if not 0 < sum(file.stat().st_size for file in path.glob("*.safetensors")) <= LARGEST_BYTES:
        return None
    return 2 * target_parameters(target.facts) * NUM_TOKENS / _fastest_pass_s(path, dtype, num_threads, seconds)


def _fastest_pass_s(path: Path, dtype: str, num_threads: int, seconds: float) -> float:
    """With one thread or with all: on a busy machine they wait for one another, and take longer than one."""
    import torch  # with transformers: seconds to import

    from components.target.layers import load_target

    decoder = load_target(path, getattr(torch, dtype)).get_decoder()
    ids = torch.arange(NUM_TOKENS)[None] % decoder.config.vocab_size

    def pass_s() -> float:
        started_s = time.monotonic()
        with torch.inference_mode():
            decoder(input_ids=ids, use_cache=False)
        return time.monotonic() - started_s

    before, passes = torch.get_num_threads(), []
    try:
        for threads in {1, num_threads}:
            torch.set_num_threads(threads)
            pass_s()
            deadline_s = time.monotonic() + seconds
            passes.append(pass_s())
            while time.monotonic() < deadline_s:
                passes.append(pass_s())
    finally:
        torch.set_num_threads(before)
    return min(passes)
