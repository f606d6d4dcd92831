"""An arm's vLLM engine: started, checked, and what its own metrics say."""

from collections.abc import Mapping
from typing import Any

import torch
import vllm
from vllm import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Counter, Gauge, Vector

from components.evaluation.acceptance import Acceptance
from components.evaluation.arms import Arm
from components.section import ConfigError


def start_engine(arm: Arm, engine_kwargs: Mapping[str, Any], **defaults: Any) -> LLMEngine:
    """A vLLM engine that serves the arm and counts per request; `engine_kwargs` go before `defaults`.

    Raises:
        ConfigError: vLLM takes what drafts for a draft of another method.
    """
    kwargs: dict[str, Any] = defaults | dict(engine_kwargs) | {"disable_log_stats": False}
    if arm.speculates:  # vLLM refuses the setting where nothing speculates
        kwargs |= {"speculative_config": arm.speculative_config(), "per_request_spec_decode_metrics": "summary"}
    engine = LLMEngine.from_engine_args(EngineArgs(**kwargs))
    _check_method(engine, arm)
    return engine


def _check_method(engine: LLMEngine, arm: Arm) -> None:
    """vLLM guesses the method of some drafts by their architecture, and then the figures would be another arm's."""
    wanted, served = arm.speculative_config(), engine.vllm_config.speculative_config
    if wanted and (served is None or served.method != wanted["method"]):
        found = served.method if served else "no speculation"
        raise ConfigError(
            f"evaluate.baselines.{arm.name}.method",
            f"vLLM serves {arm.model or 'the target'} by {found}, not by {wanted['method']}",
            "state the method that this draft was made for",
        )


def platform(engine: LLMEngine, target: str) -> dict[str, str]:
    """What figures depend on besides the arm."""
    device = engine.vllm_config.device_config.device_type
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "dtype": str(engine.model_config.dtype).removeprefix("torch."),
        "target": target,
    }


def engine_acceptance(engine: LLMEngine) -> Acceptance:
    """The engine's counters since its start (all its drafts, of every request)."""
    vectors = [metric.values for metric in engine.get_metrics() if isinstance(metric, Vector)]
    return Acceptance(
        rounds=_count(engine, "vllm:spec_decode_num_drafts"),
        drafted=_count(engine, "vllm:spec_decode_num_draft_tokens"),
        accepted=_count(engine, "vllm:spec_decode_num_accepted_tokens"),
        accepted_at=tuple(sum(values) for values in zip(*vectors, strict=True)),
    )


def num_preemptions(engine: LLMEngine) -> int:
    """Requests that the engine put back since its start because its KV cache was full."""
    return _count(engine, "vllm:num_preemptions")


def kv_capacity_tokens(engine: LLMEngine) -> int | None:
    """Tokens that the engine's KV cache has room for, from its metrics; None where they do not say."""
    for metric in engine.get_metrics():
        if isinstance(metric, Gauge) and metric.name == "vllm:cache_config_info":
            size = metric.labels.get("kv_cache_size_tokens", "")
            return int(size) if size.isdigit() else None
    return None


def _count(engine: LLMEngine, name: str) -> int:
    """A counter's value, over the engine's cores where it has several."""
    return sum(m.value for m in engine.get_metrics() if isinstance(m, Counter) and m.name == name)
