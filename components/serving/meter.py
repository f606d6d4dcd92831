"""Measuring one reply as it passes: when its tokens came, how many they were, and what was drafted and accepted."""

import json
import time
from typing import Any

from components.serving.protocol import EVENT

SOUND_ENDS = ("stop", "length")
"""Finish reasons of an answer that ended as it was asked to."""
TEXT_KEYS = ("content", "reasoning", "reasoning_content", "tool_calls", "refusal", "audio")


class Meter:
    """Reads an arm's items in their order; looks into as few events of a stream as it can, for each costs the client time."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self.started_s = time.perf_counter()
        self.has_text = False
        self.usage: dict[str, Any] = {}
        self.speculation: dict[str, Any] = {}
        self._finish_reason: str | None = None
        self._first_s: float | None = None
        self._last_s: float | None = None

    def read_answer(self, answer: dict[str, Any]) -> None:
        """A whole answer."""
        choices = answer.get("choices") or []
        self.has_text = any(_has_text(choice) for choice in choices)
        self._read_choices(choices)
        self._read_end(answer)

    def read_event(self, event: str) -> bool:
        """An event of a stream; whether it tells the usage and nothing else."""
        now = time.perf_counter()
        if self.has_text and '"usage"' not in event:
            self._last_s = now if event.startswith(EVENT) else self._last_s
            return False
        if not event.startswith(EVENT):
            return False
        fields = json.loads(event.removeprefix("data: "))
        choices = fields.get("choices") or []
        if any(_has_text(choice) for choice in choices):
            self.has_text = True
            self._first_s = self._first_s or now
        if choices:
            self._last_s = now
        self._read_choices(choices)
        self._read_end(fields)
        return not choices and bool(fields.get("usage"))

    @property
    def output_tokens(self) -> int:
        return self.usage.get("completion_tokens") or 0

    @property
    def is_empty(self) -> bool:
        """Whether the client got nothing to read: an end token alone would hide a broken arm."""
        return not self.has_text

    @property
    def is_asked_empty(self) -> bool:
        """Whether tokens without a text may be what the client asked for: a stop string hit at once, or too few tokens for a letter."""
        return self.is_empty and self.output_tokens > 0 and self._finish_reason in SOUND_ENDS

    @property
    def ttft_s(self) -> float | None:
        """Until the first text; None where the answer came as a whole."""
        return None if self._first_s is None else self._first_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None with fewer than two."""
        if self._first_s is None or self._last_s is None or self.output_tokens < 2:
            return None
        return (self._last_s - self._first_s) / (self.output_tokens - 1)

    @property
    def duration_s(self) -> float:
        return time.perf_counter() - self.started_s

    @property
    def histogram(self) -> list[int]:
        return self.speculation.get("acceptance_histogram") or []

    @property
    def accepted_at(self) -> list[int]:
        """accepted_at[i]: rounds that accepted at least i + 1 draft tokens (marginal, as vLLM counts)."""
        return [sum(self.histogram[i:]) for i in range(1, len(self.histogram))]

    def _read_choices(self, choices: list[dict[str, Any]]) -> None:
        for choice in choices:
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def _read_end(self, fields: dict[str, Any]) -> None:
        self.usage = fields.get("usage") or self.usage
        self.speculation = (fields.get("metrics") or {}).get("speculative_decoding") or self.speculation


def _has_text(choice: dict[str, Any]) -> bool:
    if choice.get("text"):  # of the completions API
        return True
    message = choice.get("delta") or choice.get("message") or {}
    return any(message.get(key) for key in TEXT_KEYS)
