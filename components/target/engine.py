"""How every vLLM engine of a run is started: the same target, dtype and sampling defaults in every stage."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.config import Settings, StageResources
from components.engine_arguments import matters

CPU_KV_CACHE_GIB = 1


def has_gpu(resources: StageResources) -> bool:
    return resources.num_gpus > 0


def target_threads(resources: StageResources) -> int:
    """Of CPUs, over all replicas, that run the target; 0 on GPUs."""
    return 0 if has_gpu(resources) else max(1, int(resources.num_cpus)) * resources.replicas


def engine_identity(settings: Settings, resources: StageResources) -> dict[str, Any]:
    """What an engine's answers depend on beside the target: for the identity of stages."""
    added = matters(resources.engine)
    return {
        "dtype": settings.target.dtype,
        "max_model_len": settings.target.max_model_len,
        **({"engine": added} if added else {}),
    }


def engine_kwargs(
    settings: Settings, resources: StageResources, target_path: Path | str, **extra: Any
) -> dict[str, Any]:
    """Arguments of `vllm.LLM`, `EngineArgs` or a served arm; `resources.engine` overrides ours, `extra` overrides both.

    Args:
        settings: Names the dtype and the longest sequence, in tokens.
        resources: The stage's; without a GPU the engine runs eagerly (compiling takes minutes on a CPU).
        target_path: The target's Hugging Face folder.
        extra: Further arguments, `speculative_config` for example.
    """
    ours = {
        "model": str(target_path),
        "dtype": settings.target.dtype,
        "max_model_len": settings.target.max_model_len,
        "seed": 0,
        "enable_prefix_caching": True,
        # A model's own sampling defaults (its generation_config.json) would change answers unseen; its end tokens stay.
        "generation_config": "vllm",
        # By itself vLLM gives Mistral's own repositories another tokenizer, whose prompts are not the chat template's.
        "tokenizer_mode": "hf",
        "trust_remote_code": False,
        "enforce_eager": not has_gpu(resources),
    }
    return ours | resources.engine | extra


def engine_env(resources: StageResources, in_process: bool = False) -> dict[str, str]:
    """Environment variables of an engine's process, for `runtime_env={"env_vars": ...}`; `resources.env` overrides ours.

    Args:
        resources: The stage's; on a CPU the engine gets `num_cpus` threads and a KV cache of `CPU_KV_CACHE_GIB`.
        in_process: Keep an offline `vllm.LLM` inside its actor, so that nothing outlives the actor. Engines with
            an asynchronous front (serving) run in a process of their own and cannot.
    """
    ours = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if in_process:
        ours["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not has_gpu(resources):
        ours |= _cpu_env(resources, in_process)
    return ours | resources.env


def _cpu_env(resources: StageResources, in_process: bool) -> Mapping[str, str]:
    env = {"VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_CACHE_GIB)}
    if in_process:  # an engine's own process sets its threads itself, from VLLM_CPU_OMP_THREADS_BIND
        env["OMP_NUM_THREADS"] = str(max(1, int(resources.num_cpus)))
    return env
