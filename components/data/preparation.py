"""From the sources in the settings to the prompts of a run, with what became of every row."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from components.config import DataConfig, PromptSource
from components.data.pretokenised import check_vocabulary
from components.data.prompts import BadRow, Prompt, read_prompts
from components.data.reasons import CHOSEN, Reason, RowError
from components.data.selection import Selection, select_prompts, used_by_source
from components.data.sources import blamed_on
from components.data.splits import Split
from components.data.template import renderable
from components.rows import RowAccount
from components.section import ConfigError

log = logging.getLogger("aerie")


@dataclass(frozen=True)
class Prepared:
    """The prompts of a run, and what became of all rows."""

    prompts: list[Prompt]
    """In the order of their keys."""
    splits: dict[str, Split]
    """The side of each, by key."""
    lost: list[BadRow]
    """Rows that are not used, but for those over a cap: they are only counted."""
    rows: RowAccount
    facts: dict[str, Any]

    def check(self, quarantine: str) -> None:
        """Raises ConfigError when nothing is left to train on: no later stage could make anything of it."""
        if "train" in self.splits.values():
            return
        if not self.prompts:
            raise ConfigError(
                "data.prompts",
                f"no prompt is left ({self.rows.table()})",
                f"{quarantine} says what is wrong with each row",
            )
        found = ", ".join(f"{side} {count}" for side, count in self.facts["splits"].items())
        raise ConfigError(
            "data.prompts",
            f"none of the {len(self.prompts)} prompts is to be trained on ({found})",
            "add prompts of families that data.held_out_families does not name, or lower data.validation_fraction",
        )


def prepare_prompts(
    data: DataConfig, tokenizer: Any, vocab_size: int, template_kwargs: Mapping[str, Any] | None = None
) -> Prepared:
    """Read the sources, choose the prompts and leave out what the target cannot be asked.

    Args:
        data: The settings.
        tokenizer: The target's, with its chat template.
        vocab_size: Number of the target's token ids.
        template_kwargs: Switches of the chat template, from `target.chat_template_kwargs`.

    Raises:
        ConfigError: at `data.prompts` or `data.benchmarks`: a source that cannot be read or holds no usable row.
    """
    read, bad = read_prompts(data.prompts)
    askable, unknown = _in_vocabulary(read, vocab_size)
    # Before anything is chosen: no cap is filled with rows that are lost afterwards, and of equal rows a usable one stays.
    shown, unshown = renderable(askable, tokenizer, template_kwargs)
    decode: Callable[[list[int]], str] = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)  # noqa: E731
    chosen = select_prompts(shown, data, _benchmark_prompts(data.benchmarks, vocab_size), decode)
    lost = [*bad, *unknown, *unshown, *chosen.left]
    facts = _facts(chosen.prompts, chosen.splits, chosen) | {"sources": used_by_source(read, chosen.prompts, data)}
    rows = _account(chosen.prompts, lost, chosen.over_cap)
    return Prepared(chosen.prompts, chosen.splits, lost, rows, facts)


def without_choices(rows: RowAccount) -> RowAccount:
    """The account of the rows that something may be wrong with: the settings leave out the others."""
    dropped = {reason: count for reason, count in rows.dropped.items() if reason not in CHOSEN}
    chosen = sum(rows.dropped.values()) - sum(dropped.values())
    return replace(rows, rows_in=rows.rows_in - chosen, dropped=dropped)


def _in_vocabulary(prompts: Sequence[Prompt], vocab_size: int) -> tuple[list[Prompt], list[BadRow]]:
    good: list[Prompt] = []
    bad: list[BadRow] = []
    for prompt in prompts:
        try:
            check_vocabulary(prompt.ids or [], vocab_size)
        except RowError as error:
            bad.append(BadRow(prompt.source, prompt.line, error.reason.value, error.detail))
        else:
            good.append(prompt)
    return good, bad


def _benchmark_prompts(sources: Sequence[PromptSource], vocab_size: int) -> list[Prompt]:
    if not sources:
        return []
    with blamed_on("data.benchmarks"):
        prompts, bad = read_prompts(sources)
    good, unknown = _in_vocabulary(prompts, vocab_size)
    for row in [*bad, *unknown]:
        log.warning("data.benchmarks: %s:%d is not compared with: %s", row.source, row.line, row.reason)
    return good


def _account(prompts: Sequence[Prompt], lost: Sequence[BadRow], over_cap: int) -> RowAccount:
    cut = sum(prompt.cut is not None for prompt in prompts)
    dropped = Counter(row.reason for row in lost)
    if over_cap:
        dropped[Reason.OVER_CAP.value] = over_cap
    return RowAccount(len(prompts) + dropped.total(), len(prompts) - cut, cut, dict(dropped))


def _facts(prompts: Sequence[Prompt], splits: dict[str, Split], chosen: Selection) -> dict[str, Any]:
    return {
        "turns": sum(len(prompt.turns()) for prompt in prompts),
        "splits": dict(sorted(Counter(splits.values()).items())),
        "families": dict(sorted(Counter(prompt.family for prompt in prompts).items())),
        "cut": dict(sorted(Counter(prompt.cut.value for prompt in prompts if prompt.cut).items())),
        "contaminated": chosen.contaminated,
    }
