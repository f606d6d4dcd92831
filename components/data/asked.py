"""How much is asked of the target, in figures that the plan needs: of a list of prompts, or of its sources before it is written."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Any

from components.data.prompts import Prompt

BYTES_PER_TOKEN = 4
"""Of a prompt's text in UTF-8, quotes and key names of its messages included: they stand for what the chat template adds."""


@dataclass(frozen=True)
class Asked:
    """Sums over prompts."""

    prompts: int = 0
    turns: int = 0
    """Each is answered once."""
    text_bytes: int = 0
    """Of all messages and tools, each once."""
    repeated_bytes: int = 0
    """Of all turns as they are asked: with the turns before them."""
    earlier_answers: int = 0
    """Answers that stand before a turn, over all turns: T (T - 1) / 2 for a conversation of T."""

    @classmethod
    def of(cls, prompts: Iterable[Prompt]) -> "Asked":
        total = dict.fromkeys((field.name for field in fields(cls)), 0)
        for prompt in prompts:
            sizes = _turn_bytes(prompt)
            for name, value in asdict(_one(sizes)).items():
                total[name] += value
        return cls(**total)

    @property
    def tokens(self) -> int:
        """About how many tokens all conversations have, without answers."""
        return self.text_bytes // BYTES_PER_TOKEN

    @property
    def repeated_tokens(self) -> int:
        """About how many tokens all turns have as they are asked, without answers."""
        return self.repeated_bytes // BYTES_PER_TOKEN

    def __add__(self, other: "Asked") -> "Asked":
        return Asked(**{name: value + getattr(other, name) for name, value in asdict(self).items()})

    def capped(self, most: int | None) -> "Asked":
        """Of so many prompts at most, whichever they are; None: of all."""
        share = 1.0 if most is None else min(1.0, most / max(1, self.prompts))
        return Asked(**{name: round(share * value) for name, value in asdict(self).items()})


def _one(sizes: list[int]) -> Asked:
    turns = len(sizes)
    return Asked(1, turns, sum(sizes), sum(accumulate(sizes)), turns * (turns - 1) // 2)


def _turn_bytes(prompt: Prompt) -> list[int]:
    """Of each turn; tools stand before the first one."""
    if prompt.ids is not None:
        return [BYTES_PER_TOKEN * len(prompt.ids)]
    first, *others = ([_utf8_bytes(message) for message in turn] for turn in prompt.turns())
    return [_utf8_bytes(prompt.tools or "") + sum(first), *map(sum, others)]


def _utf8_bytes(value: Any) -> int:
    return len(str(value).encode(errors="surrogatepass"))
