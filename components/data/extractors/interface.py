"""What extracts features: the target in transformers, or in vLLM where it needs several GPUs.

Both hand back the same states of the same layers; the last bits differ, as their kernels add in different orders.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from components.config import Settings
from components.target.aux_layers import choose_aux_layers
from components.target.engine import engine_env, engine_kwargs
from components.target.layers import Captured

VLLM = "vllm"
LONGEST_FITS = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"
}  # documents may be as long as the target's positions, and a token follows


class Extractor(Protocol):
    """Holds the target."""

    def extract(self, documents: Sequence[Sequence[int]]) -> Iterator[Captured]:
        """The states of each document alone, in the order of the documents, on the CPU in the target's dtype.

        Args:
            documents: Token ids of each, as many as fit in `target.max_model_len`.
        """
        ...


@dataclass(frozen=True)
class ExtractorSpec:
    """What an extractor is started from; plain values, so that any process can start it."""

    name: str
    target_path: str
    aux_layers: tuple[int, ...]
    num_layers: int
    """Decoder layers of the target."""
    dtype: str
    batch_tokens: int
    num_threads: int
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Of vLLM's engine."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment that the extractor's process needs."""

    def start(self) -> Extractor:
        """Load the target; takes seconds to minutes."""
        # each imports a library that the other does without
        if self.name == VLLM:
            from components.data.extractors.with_vllm import start_vllm

            return start_vllm(self)
        from components.data.extractors.with_transformers import TransformersExtractor

        return TransformersExtractor(self)


def extractor_spec(settings: Settings, target: Mapping[str, Any], target_path: str) -> ExtractorSpec:
    """The extractor that the settings name, on the resources of the features stage.

    Args:
        settings: The run's.
        target: Facts of the target stage.
        target_path: The target's Hugging Face folder.

    Raises:
        ConfigError: aux layers that the target does not have.
    """
    resources = settings.resources.features
    num_threads = max(1, int(resources.num_cpus))
    in_vllm = settings.data.extractor == VLLM
    return ExtractorSpec(
        name=settings.data.extractor,
        target_path=target_path,
        aux_layers=tuple(choose_aux_layers(settings.draft.aux_layers, target["num_layers"])),
        num_layers=target["num_layers"],
        dtype=settings.target.dtype,
        batch_tokens=settings.data.batch_tokens,
        num_threads=num_threads,
        engine_kwargs=engine_kwargs(settings, resources, target_path) if in_vllm else {},
        env=LONGEST_FITS | engine_env(resources, in_process=True)
        if in_vllm
        else {"OMP_NUM_THREADS": str(num_threads)} | resources.env,
    )
