"""vLLM engine arguments that a user may add (`resources.<stage>.engine`): which are refused, and which change what comes out."""

from collections.abc import Iterator, Mapping
from typing import Any

from components.arm_config import ArmConfig

OWN_SETTINGS = {
    "model": "target.model",
    "tokenizer": "target.model",
    "revision": "target.revision",
    "dtype": "target.dtype",
    "max_model_len": "target.max_model_len",
}
"""Arguments that are the same in all stages, with the setting that gives them."""
FIXED = ("seed", "generation_config", "tokenizer_mode", "trust_remote_code", "speculative_config")
"""Arguments that the project gives each engine itself."""
PLACEMENT = frozenset(
    {
        "block_size",
        "compilation_config",
        "cpu_offload_gb",
        "data_parallel_size",
        "disable_log_stats",
        "distributed_executor_backend",
        "download_dir",
        "enable_chunked_prefill",
        "enable_expert_parallel",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "load_format",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_parallel_loading_workers",
        "num_gpu_blocks_override",
        "pipeline_parallel_size",
        "swap_space",
        "tensor_parallel_size",
    }
)
"""Arguments that say where and how fast an engine computes, never what (but for rounding)."""


def matters(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that change what an engine says, for a stage's identity: all that are not known to be `PLACEMENT`."""
    return {name: engine[name] for name in sorted(engine) if name not in PLACEMENT}


def engine_problems(engines: Mapping[str, Mapping[str, Any]], arms: Mapping[str, ArmConfig]) -> Iterator[str]:
    """`problem: fix` lines of engine arguments that the new head (a P-EAGLE head) or another arm cannot run with.

    Args:
        engines: `resources.<stage>.engine` by stage.
        arms: `evaluate.baselines`.
    """
    for stage, engine in engines.items():
        place = f"resources.{stage}.engine"
        for name in sorted(engine.keys() & OWN_SETTINGS.keys()):
            yield f"{place}.{name} would change the target in one stage only: set {OWN_SETTINGS[name]}"
        for name in sorted(engine.keys() & {*FIXED} - {"speculative_config"}):
            yield f"{place}.{name} is the same for every engine of a run: remove it"
        if "speculative_config" in engine:
            yield (
                f"{place}.speculative_config would make every arm speculate, plain decoding too: "
                "name an arm in evaluate.baselines"
            )
    for stage in engines.keys() & {"evaluate", "ab"}:
        yield from _arm_problems(f"resources.{stage}.engine", engines[stage], arms)


def _arm_problems(place: str, engine: Mapping[str, Any], arms: Mapping[str, ArmConfig]) -> Iterator[str]:
    if engine.get("pipeline_parallel_size", 1) != 1:
        yield f"{place}.pipeline_parallel_size and P-EAGLE do not go together: use tensor_parallel_size"
    width = engine.get("tensor_parallel_size", 1)
    for name, arm in arms.items():
        if arm.draft_tensor_parallel_size not in (None, 1, width):
            yield (
                f"evaluate.baselines.{name}.draft_tensor_parallel_size is neither 1 nor the target's {width} "
                f"({place}.tensor_parallel_size): set one of the two"
            )
