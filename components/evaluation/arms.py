"""Arms: the ways to serve one target that are compared with each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from components.config import ArmConfig


@dataclass(frozen=True)
class Arm:
    name: str
    method: Literal["none", "ngram", "p_eagle"]
    num_speculative_tokens: int | None = None
    """K; None on an arm that does not speculate."""
    head: str | None = None
    """Folder of a P-EAGLE head in vLLM's plain layout."""
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None

    def __post_init__(self) -> None:
        if self.method != "none" and not self.num_speculative_tokens:
            raise ValueError(f"num_speculative_tokens: arm {self.name!r} ({self.method}) needs at least 1")
        if (self.method == "p_eagle") != (self.head is not None):
            raise ValueError(f"head: arm {self.name!r} ({self.method}) has {self.head!r}; only p_eagle takes one")

    @property
    def speculates(self) -> bool:
        return self.method != "none"

    def speculative_config(self) -> dict[str, Any] | None:
        """vLLM's `speculative_config`; None where there is no speculation."""
        if self.method == "none":
            return None
        config: dict[str, Any] = {"num_speculative_tokens": self.num_speculative_tokens}
        if self.method == "p_eagle":
            # vLLM has no method of its own for P-EAGLE: it is eagle3 with all K tokens drafted in one pass
            return config | {"method": "eagle3", "model": self.head, "parallel_drafting": True}
        bounds = {"prompt_lookup_min": self.prompt_lookup_min, "prompt_lookup_max": self.prompt_lookup_max}
        return config | {"method": "ngram"} | {name: value for name, value in bounds.items() if value is not None}


def head_arm(name: str, head: Path | str, num_speculative_tokens: int) -> Arm:
    return Arm(name, "p_eagle", num_speculative_tokens, head=str(head))


def baseline_arms(baselines: Mapping[str, ArmConfig]) -> list[Arm]:
    """The arms of `evaluate.baselines`; `none` first, because the others are compared with it."""
    arms = [Arm(name, **config.model_dump()) for name, config in baselines.items()]
    return sorted(arms, key=lambda arm: arm.speculates)
