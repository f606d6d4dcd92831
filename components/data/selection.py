"""Which prompts a run uses: one of each, none that gives the evaluation away, and no more than asked for.

The order: equal rows, sides, contamination, near duplicates, caps. So a cap is filled with prompts that are all different,
and what is held out stays whatever is on the other side.
"""

import hashlib
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from components.config import DataConfig
from components.data.contamination import find_repeats
from components.data.prompts import BadRow, Prompt
from components.data.reasons import Reason
from components.data.said import Said
from components.data.similarity import SHINGLE_WORDS, NearIndex, grams, words
from components.data.sources import shown_name
from components.data.splits import Split, split_prompts

log = logging.getLogger("aerie")

SIDES = ("held_out", "validation", "train")


@dataclass
class Selection:
    """Rows in = prompts + left + over_cap."""

    prompts: list[Prompt]
    """In the order of their keys."""
    splits: dict[str, Split]
    """The side of each, by key."""
    left: list[BadRow] = field(default_factory=list)
    """Duplicates and contaminated rows, each with what it repeats."""
    over_cap: int = 0
    contaminated: int = 0
    """Prompts that repeat an evaluation prompt, whether they were left out or not."""


def select_prompts(
    prompts: Sequence[Prompt], data: DataConfig, benchmarks: Sequence[Prompt], read_ids: Callable[[list[int]], Said]
) -> Selection:
    """Choose the prompts of a run and deal them to the sides.

    Args:
        prompts: All usable ones, in the order of their keys, equal ones numbered.
        data: The settings.
        benchmarks: Further prompts that none for training may repeat.
        read_ids: What a prompt that is given as ids says.
    """
    chosen = Selection(list(prompts), {})
    if data.deduplicate != "off":
        _leave_out(chosen, _equal_rows(chosen.prompts, data.held_out_families), Reason.DUPLICATE)
    chosen.splits = split_prompts(chosen.prompts, data.held_out_families, data.validation_fraction)
    if data.contamination != "off":
        _judge_repeats(chosen, data, benchmarks, read_ids)
    if data.deduplicate == "near":
        _leave_out(chosen, _near_rows(chosen, data.near_similarity, read_ids), Reason.NEAR_DUPLICATE)
    kept = capped(chosen.prompts, data)
    chosen.over_cap = len(chosen.prompts) - len(kept)
    chosen.prompts = sorted(kept, key=lambda prompt: prompt.key)
    chosen.splits = {prompt.key: chosen.splits[prompt.key] for prompt in chosen.prompts}
    return chosen


def capped(prompts: list[Prompt], data: DataConfig) -> list[Prompt]:
    """At most as many of each source, and of all, as the settings allow, drawn by hash, each family its share.

    With weights the total is shared out in their proportion; what a source cannot fill goes to the others.
    """
    parts = [[prompt for prompt in prompts if prompt.origin == origin] for origin in range(len(data.prompts))]
    drawn = [_draw(part, source.max_prompts, data.seed) for part, source in zip(parts, data.prompts, strict=True)]
    weights = [source.weight for source in data.prompts if source.weight is not None]
    if data.max_prompts is not None and weights:
        quotas = share_out([len(part) for part in drawn], weights, data.max_prompts)
        drawn = [_draw(part, quota, data.seed) for part, quota in zip(drawn, quotas, strict=True)]
    return _draw([prompt for part in drawn for prompt in part], data.max_prompts, data.seed)


def share_out(sizes: list[int], weights: list[float], total: int) -> list[int]:
    """`total` in proportion of `weights`, none more than its size; what one cannot fill the others get.

    Whole numbers by largest remainder.
    """
    quotas = [0] * len(sizes)
    unfilled = [i for i, size in enumerate(sizes) if size]
    left = min(total, sum(sizes))
    while unfilled:
        unit = left / sum(weights[i] for i in unfilled)
        full = [i for i in unfilled if sizes[i] <= unit * weights[i]]
        if not full:
            exact = {i: unit * weights[i] for i in unfilled}
            quotas = [int(exact[i]) if i in exact else quota for i, quota in enumerate(quotas)]
            short = left - sum(quotas[i] for i in unfilled)
            for i in sorted(unfilled, key=lambda i: (int(exact[i]) - exact[i], i))[:short]:
                quotas[i] += 1
            break
        for i in full:
            quotas[i] = sizes[i]
            left -= sizes[i]
        unfilled = [i for i in unfilled if i not in full]
    return quotas


def _leave_out(chosen: Selection, repeats: dict[str, str], reason: Reason) -> None:
    out = [prompt for prompt in chosen.prompts if prompt.key in repeats]
    chosen.left += [BadRow(p.source, p.line, reason.value, repeats[p.key]) for p in out]
    chosen.prompts = [prompt for prompt in chosen.prompts if prompt.key not in repeats]


def _equal_rows(prompts: list[Prompt], held_out_families: list[str]) -> dict[str, str]:
    """All but one of each content; the one of a held-out family stays, so that it is measured in that family."""
    first: dict[str, Prompt] = {}
    for prompt in sorted(prompts, key=lambda p: (p.family not in held_out_families, p.key)):
        first.setdefault(prompt.content, prompt)
    stays = {prompt.key for prompt in first.values()}
    return {p.key: f"equal to {_place(first[p.content])}" for p in prompts if p.key not in stays}


def _judge_repeats(
    chosen: Selection, data: DataConfig, benchmarks: Sequence[Prompt], read_ids: Callable[[list[int]], Said]
) -> None:
    held_out = [prompt for prompt in chosen.prompts if chosen.splits[prompt.key] == "held_out"]
    others = [prompt for prompt in chosen.prompts if chosen.splits[prompt.key] != "held_out"]
    repeats = find_repeats(others, [*held_out, *benchmarks], data.near_similarity, read_ids)
    chosen.contaminated = len(repeats)
    if data.contamination == "drop":
        _leave_out(chosen, repeats, Reason.CONTAMINATED)
        return
    for prompt in others:
        if prompt.key in repeats:
            log.warning("prompts: %s would give an evaluation away: %s", _place(prompt), repeats[prompt.key])


def _near_rows(chosen: Selection, similarity: float, read_ids: Callable[[list[int]], Said]) -> dict[str, str]:
    index, repeats = NearIndex(similarity), {}
    for prompt in sorted(chosen.prompts, key=lambda p: (SIDES.index(chosen.splits[p.key]), p.key)):
        shingles = grams(words(_whole_text(prompt, read_ids)), SHINGLE_WORDS)
        if found := index.find(shingles):
            repeats[prompt.key] = f"{found[1]:.2f} like {found[0]}"
        else:
            index.add(_place(prompt), shingles)
    return repeats


def _whole_text(prompt: Prompt, read_ids: Callable[[list[int]], Said]) -> str:
    if prompt.ids is not None:
        return read_ids(prompt.ids).text
    return "\n".join([*(message["content"] for message in prompt.messages), json.dumps(prompt.tools or "")])


def _place(prompt: Prompt) -> str:
    return f"{prompt.source}:{prompt.line}"


def _draw(prompts: list[Prompt], most: int | None, seed: int) -> list[Prompt]:
    """At most `most`, each family its share to within one, chosen by hash and never by position."""
    if most is None or len(prompts) <= most:
        return prompts
    families: dict[str, list[tuple[str, Prompt]]] = defaultdict(list)
    for prompt in prompts:
        families[prompt.family].append((hashlib.sha256(f"{seed}:{prompt.key}".encode()).hexdigest(), prompt))
    return [prompt for _, _, prompt in sorted(_places(families.values()), key=lambda place: place[:2])[:most]]


def _places(families: Iterable[list[tuple[str, Prompt]]]) -> Iterator[tuple[float, str, Prompt]]:
    # The i-th of n stands at (i + u) / n of its family, u in [0, 1) by hash: the smallest come from all families alike.
    for family in families:
        ordered = sorted(family, key=lambda pair: pair[0])
        offset = int(ordered[0][0][-13:], 16) / 16**13
        for i, (drawn, prompt) in enumerate(ordered):
            yield (i + offset) / len(ordered), drawn, prompt


def used_by_source(read: Sequence[Prompt], used: Sequence[Prompt], data: DataConfig) -> dict[str, dict[str, int]]:
    """How many usable prompts each source has, and how many of them the run uses."""
    before, after = (Counter(prompt.origin for prompt in prompts) for prompts in (read, used))
    names = [shown_name(source) for source in data.prompts]
    return {f"{i + 1}: {name}": {"usable": before[i], "used": after[i]} for i, name in enumerate(names)}
