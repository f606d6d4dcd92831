"""Which side a prompt is on: train, validation or held out, by family and by the hash of its content, never by position."""

from typing import Literal

from components.data.prompts import Prompt

Split = Literal["train", "validation", "held_out"]


def split_prompts(prompts: list[Prompt], held_out_families: list[str], validation_fraction: float) -> dict[str, Split]:
    """The side of every prompt, by key.

    A row that equals one of a held-out family is held out too, whatever its own family. Where no prompt is of a held-out
    family, the hash range [0, f) is held out and [f, 2f) is validation, with f the `validation_fraction`.
    """
    held_out = {prompt.content for prompt in prompts if prompt.family in held_out_families}
    if not held_out:
        return {prompt.key: _by_hash_alone(_position(prompt), validation_fraction) for prompt in prompts}
    return {
        prompt.key: "held_out" if prompt.content in held_out else _by_hash(_position(prompt), validation_fraction)
        for prompt in prompts
    }


def _by_hash(position: float, fraction: float) -> Split:
    return "validation" if position < fraction else "train"


def _by_hash_alone(position: float, fraction: float) -> Split:
    return "held_out" if position < fraction else _by_hash(position - fraction, fraction)


def _position(prompt: Prompt) -> float:
    """Where the content's hash lies in [0, 1); 52 bits, so that a float holds it exactly."""
    return int(prompt.content[:13], 16) / 16**13
