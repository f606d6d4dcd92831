"""From the sources in the settings to the prompts of a run, with what became of every row."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from components.config import DataConfig, PromptSource, Settings
from components.data.asked import Asked
from components.data.parts import QUARANTINE, write_quarantine
from components.data.pretokenised import check_vocabulary
from components.data.prompt_list import write_prompts
from components.data.prompts import BadRow, Prompt, read_prompts
from components.data.reasons import CHOSEN, Reason, RowError
from components.data.said import reader_of_ids
from components.data.selection import Selection, select_prompts, used_by_source
from components.data.shapes import published_row
from components.data.sources import blamed_on
from components.data.splits import Split
from components.data.template import renderable
from components.rows import RowAccount, check_rows
from components.section import ConfigError
from components.storage import Location

log = logging.getLogger("aerie")


@dataclass(frozen=True)
class Prepared:
    """The prompts of a run, and what became of all rows."""

    prompts: list[Prompt]
    """In the order of their keys."""
    splits: dict[str, Split]
    """The side of each, by key."""
    lost: list[BadRow]
    """Rows that are not used, by file and line, but for those over a cap: they are only counted."""
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
    data: DataConfig,
    tokenizer: Any,
    vocab_size: int,
    template_kwargs: Mapping[str, Any] | None = None,
    measured_with: Mapping[str, Sequence[PromptSource]] | None = None,
) -> Prepared:
    """Read the sources, choose the prompts and leave out what the target cannot be asked.

    Args:
        data: The settings.
        tokenizer: The target's, with its chat template.
        vocab_size: Number of the target's token ids.
        template_kwargs: Switches of the chat template, from `target.chat_template_kwargs`.
        measured_with: By setting, sources of prompts that none for training may repeat.

    Raises:
        ConfigError: at `data.prompts` or a setting of `measured_with`: a source that cannot be read or holds no usable row.
    """
    read, bad = read_prompts(data.prompts)
    askable, unknown = _in_vocabulary(read, vocab_size)
    # Before anything is chosen: no cap is filled with rows that are lost afterwards, and of equal rows a usable one stays.
    shown, unshown = renderable(askable, tokenizer, template_kwargs)
    benchmarks = [
        prompt
        for setting, sources in (measured_with or {}).items()
        for prompt in _benchmark_prompts(sources, setting, vocab_size)
    ]
    chosen = select_prompts(shown, data, benchmarks, reader_of_ids(tokenizer, template_kwargs))
    lost = sorted([*bad, *unknown, *unshown, *chosen.left], key=lambda row: (row.source, row.line))
    facts = _facts(chosen.prompts, chosen.splits, chosen) | {"sources": used_by_source(read, chosen.prompts, data)}
    rows = _account(chosen.prompts, lost, chosen.over_cap)
    return Prepared(chosen.prompts, chosen.splits, lost, rows, facts)


def write_prepared(settings: Settings, target_path: str, vocab_size: int, output: Location) -> tuple[RowAccount, dict]:
    """Prepare the prompts and write their list, and the quarantine of the rows that are not used.

    Raises:
        ConfigError: as `prepare_prompts`, or nothing is left to train on.
        TooManyRowsLost: more rows are unusable than `data.max_dropped_fraction` allows.
    """
    # seconds to import, and the driver imports this module in every run
    from components.target.chat import load_tokenizer

    tokenizer = load_tokenizer(target_path)
    kwargs = settings.target.chat_template_kwargs
    prepared = prepare_prompts(settings.data, tokenizer, vocab_size, kwargs, measured_with(settings))
    write_prompts(output, prepared.prompts, prepared.splits)
    write_quarantine(output, map(asdict, prepared.lost))
    quarantine = output.join(QUARANTINE).uri
    first = next((str(row) for row in prepared.lost if row.reason not in CHOSEN), None)
    check_rows(without_choices(prepared.rows), settings.data.max_dropped_fraction, "prompts", quarantine, first)
    prepared.check(quarantine)
    return prepared.rows, prepared.facts


def measured_with(settings: Settings) -> dict[str, list[PromptSource]]:
    """Prompts beside the held-out ones that none for training may repeat, by the setting that names them."""
    answered = {
        f"evaluate.benchmarks.{name}.path": [PromptSource(path=benchmark.path)]
        for name, benchmark in settings.evaluate.benchmarks.items()
    }
    tasks = {f"speed.prompts.{name}": [PromptSource(path=path)] for name, path in settings.speed.prompts.items()}
    return {"data.benchmarks": settings.data.benchmarks} | answered | tasks


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


def _benchmark_prompts(sources: Sequence[PromptSource], setting: str, vocab_size: int) -> list[Prompt]:
    if not sources:
        return []
    with blamed_on(setting):
        prompts, bad = read_prompts(sources, published_row)
    good, unknown = _in_vocabulary(prompts, vocab_size)
    for row in [*bad, *unknown]:
        log.warning("%s: %s:%d is not compared with: %s", setting, row.source, row.line, row.reason)
    return good


def _account(prompts: Sequence[Prompt], lost: Sequence[BadRow], over_cap: int) -> RowAccount:
    cut = sum(prompt.cut is not None for prompt in prompts)
    dropped = Counter(row.reason for row in lost)
    if over_cap:
        dropped[Reason.OVER_CAP.value] = over_cap
    return RowAccount(len(prompts) + dropped.total(), len(prompts) - cut, cut, dict(dropped))


def _facts(prompts: Sequence[Prompt], splits: dict[str, Split], chosen: Selection) -> dict[str, Any]:
    return {
        "asked": asdict(Asked.of(prompts)),
        "splits": dict(sorted(Counter(splits.values()).items())),
        "families": dict(sorted(Counter(prompt.family for prompt in prompts).items())),
        "cut": dict(sorted(Counter(prompt.cut.value for prompt in prompts if prompt.cut).items())),
        "contaminated": chosen.contaminated,
    }
