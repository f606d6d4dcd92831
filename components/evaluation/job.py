"""What every task of an evaluation needs to know, and where its files are."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from components.config import Settings, StageResources
from components.evaluation.benchmarks import place_of
from components.evaluation.prompts import PREFLIGHT_TOKENS
from components.storage import Location
from components.target.engine import engine_kwargs

DRAFT_ROOM = 32
"""Tokens kept free behind an answer: closer to the engine's limit than K, vLLM drafts zeros and counts them as refused."""
HELD_OUT = "arms"
"""Folder of the greedy answers to the held-out prompts, one file an arm."""
AGAIN = "again"
"""Folder of the second speed pass, one file an arm that the gate compares."""


@dataclass(frozen=True)
class Job:
    settings: Settings
    target_path: str
    target_digest: str
    vocab_size: int
    responses: Location
    output: Location
    turns: Mapping[str, int] = field(default_factory=dict)
    """Turns of each benchmark's longest conversation, by its name."""

    @property
    def resources(self) -> StageResources:
        return self.settings.resources.evaluate

    @property
    def max_prompt_tokens(self) -> int:
        evaluate = self.settings.evaluate
        return self.room_for(max(evaluate.max_new_tokens, evaluate.speed_tokens, PREFLIGHT_TOKENS))

    def room_for(self, answer_tokens: int) -> int:
        """Tokens of the longest prompt that such an answer still fits behind."""
        return self.settings.target.max_model_len - answer_tokens - DRAFT_ROOM

    def engine_kwargs(self) -> dict[str, Any]:
        return engine_kwargs(self.settings, self.resources, self.target_path)

    def arm_file(self, name: str, place: str = HELD_OUT) -> Location:
        """The arm's answers to one set of prompts."""
        return self.output.join(place, f"{name}.json")

    def places(self, only_held_out: bool) -> Iterator[str]:
        """Folders of all sets of prompts that an arm answers, in this order."""
        yield HELD_OUT
        if only_held_out:
            return
        yield from (sampled_place(t) for t in self.settings.evaluate.temperatures if t)
        for name, turns in self.turns.items():
            yield from (place_of(name, turn) for turn in range(1, turns + 1))

    def is_measured(self, name: str, only_held_out: bool) -> bool:
        return all(self.arm_file(name, place).exists() for place in self.places(only_held_out))


def sampled_place(temperature: float) -> str:
    return f"sampled/{temperature}"
