"""Arms: the ways to serve one target that are compared with each other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from components.arm_config import NEED_A_MODEL, ArmConfig, Method
from components.section import ConfigError

SUFFIX_PACKAGE, SUFFIX_MODULE = "arctic-inference", "arctic_inference"
MARKS_OF_OTHERS = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""vLLM looks for these in a draft's name or path, and then serves it by that method, whatever was asked for."""


@dataclass(frozen=True)
class Arm:
    name: str
    method: Method
    num_speculative_tokens: int | None = None
    """K; None on an arm that does not speculate."""
    model: str | None = None
    """What drafts: a folder, or a Hugging Face id whose commit is in the options."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of vLLM's speculative config."""

    def __post_init__(self) -> None:
        if self.method != "none" and not self.num_speculative_tokens:
            raise ValueError(f"num_speculative_tokens: arm {self.name!r} ({self.method}) needs at least 1")
        if self.method in NEED_A_MODEL and self.model is None:
            raise ValueError(f"model: arm {self.name!r} ({self.method}) has nothing to draft with")
        if self.method in ("none", "ngram", "suffix") and self.model is not None:
            raise ValueError(f"model: arm {self.name!r} ({self.method}) drafts without {self.model!r}")

    @property
    def speculates(self) -> bool:
        return self.method != "none"

    @property
    def is_synthetic(self) -> bool:
        """Whether it accepts drafts by chance: its figures say nothing of what drafts."""
        return self.options.get("rejection_sample_method") == "synthetic"

    def speculative_config(self) -> dict[str, Any] | None:
        """vLLM's `speculative_config`; None where there is no speculation."""
        if self.method == "none":
            return None
        config: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.num_speculative_tokens}
        if (
            self.method == "peagle"
        ):  # vLLM has no method of its own for it: eagle3 with all K tokens drafted in one pass
            config |= {"method": "eagle3", "parallel_drafting": True}
        if self.model is not None:
            config["model"] = self.model
        return {**config, **self.options}


class SyntheticArm(ConfigError):
    """An arm that accepts by chance, where only real figures may pass: in front of users, or in the registry."""


def synthetic_arms(baselines: Mapping[str, ArmConfig]) -> list[str]:
    """Names of those that accept by chance."""
    return [name for name, config in baselines.items() if config.rejection_sample_method == "synthetic"]


def refuse_synthetic(names: Iterable[str], whose: str) -> None:
    """Raises SyntheticArm for the first of the arms `names`; `whose` says what stands in its way."""
    for name in names:
        raise SyntheticArm(
            f"evaluate.baselines.{name}.rejection_sample_method",
            f"arm {name} accepts drafts by chance, for load tests only, and {whose} refuses it",
            "set it to standard, or end the run before with --until evaluation",
        )


def head_arm(name: str, head: Path | str, num_speculative_tokens: int) -> Arm:
    """The arm of a P-EAGLE head in vLLM's plain layout."""
    return Arm(name, "peagle", num_speculative_tokens, str(head))


def baseline_arms(
    baselines: Mapping[str, ArmConfig], drafts: Mapping[str, Mapping[str, str]] | None = None
) -> list[Arm]:
    """The arms of `evaluate.baselines`; `none` first, because the others are compared with it.

    Args:
        baselines: The settings.
        drafts: By arm: `model`, and `revision` where it has one, as the stage `drafts` found them.
    """
    arms = [baseline_arm(name, config, (drafts or {}).get(name, {})) for name, config in baselines.items()]
    return sorted(arms, key=lambda arm: arm.speculates)


def baseline_arm(name: str, config: ArmConfig, draft: Mapping[str, str]) -> Arm:
    """Raises ConfigError where vLLM would take the draft for one of another method."""
    stated = {**config.stated(), **draft}
    k, model = stated.pop("num_speculative_tokens", None), stated.pop("model", None)
    _refuse_a_guess(name, config.method, model)
    return Arm(name, config.method, k, model, stated)


def check_baselines(baselines: Mapping[str, ArmConfig]) -> None:
    """Raises ConfigError for a method whose package is not installed."""
    for name, config in baselines.items():
        if config.method == "suffix" and find_spec(SUFFIX_MODULE) is None:
            raise ConfigError(
                f"evaluate.baselines.{name}.method",
                f"suffix drafting needs the package {SUFFIX_PACKAGE}, which is not installed",
                f"`pip install --no-deps {SUFFIX_PACKAGE}` on every node (it builds for a minute), or leave the arm out",
            )


def _refuse_a_guess(name: str, method: Method, model: str | None) -> None:
    if method not in ("draft_model", "mtp") or model is None:
        return
    for mark, guess in MARKS_OF_OTHERS.items():
        if mark in model.lower():
            raise ConfigError(
                f"evaluate.baselines.{name}.model",
                f"vLLM would serve {model} by the method {guess}, because its name holds {mark!r}, not by {method}",
                "rename the folder, or state that method",
            )
