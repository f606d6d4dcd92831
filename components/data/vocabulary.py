"""The draft vocabulary: the target ids that a head may draft, chosen by how often the target answers with them."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import ray
from safetensors.numpy import load, save

from components.data.parts import part_names, read_columns
from components.stage import Outcome
from components.storage import Location

log = logging.getLogger("aerie")

VOCABULARY = "vocabulary.safetensors"
PARTS_PER_TASK = 64
TASKS_AT_ONCE = 8


class TokenCounts(NamedTuple):
    """How often every target id occurs, [V] each."""

    train_answers: np.ndarray
    train_prompts: np.ndarray
    held_out_answers: np.ndarray
    others: np.ndarray
    """In held-out prompts and in everything of validation."""


def build_vocabulary(
    responses: Location, vocab_size: int, target_vocab_size: int, eos_token_ids: Sequence[int], output: Location
) -> Outcome:
    """Write `vocabulary.safetensors` with the chosen ids and all that occur, and say what share of the answers is covered.

    Args:
        responses: Output folder of the responses stage.
        vocab_size: Ids to choose; capped at the target's.
        target_vocab_size: V.
        eos_token_ids: Ids that end an answer: always chosen, or a head could never draft an end.
        output: Where the file goes.
    """
    counts = _count_in_tasks(responses, target_vocab_size)
    ids = choose_ids(counts, vocab_size, eos_token_ids)
    used = np.flatnonzero(sum(counts))
    output.join(VOCABULARY).write_bytes(save({"draft_token_ids": ids, "used_token_ids": used}))
    facts = {
        "size": len(ids),
        "target_size": target_vocab_size,
        "coverage_train": _covered(counts.train_answers, ids),
        "coverage_held_out": _covered(counts.held_out_answers, ids),
    }
    log.info("vocabulary: %s", ", ".join(f"{name} {value}" for name, value in facts.items()))
    return Outcome(facts)


def read_used_ids(vocabulary: Location) -> frozenset[int]:
    """Every id that occurs in a prompt or an answer, of a finished vocabulary stage."""
    return frozenset(load(vocabulary.join(VOCABULARY).read_bytes())["used_token_ids"].tolist())


def choose_ids(counts: TokenCounts, vocab_size: int, eos_token_ids: Sequence[int]) -> np.ndarray:
    """[min(vocab_size, V)] int64 ids, ascending.

    First the end tokens, then the ids of training answers by frequency; little data has fewer than asked for, so the rest is
    filled with ids of training prompts by frequency, then with the lowest ids (common tokens in every vocabulary by merges).
    """
    size = len(counts.train_answers)
    preferred = [
        np.asarray(eos_token_ids, dtype=np.int64),
        _by_frequency(counts.train_answers),
        _by_frequency(counts.train_prompts),
        np.arange(size),
    ]
    candidates = np.concatenate(preferred)
    _, first = np.unique(candidates, return_index=True)
    return np.sort(candidates[np.sort(first)][: min(vocab_size, size)])


def count_tokens(responses: Location, names: Sequence[str], vocab_size: int) -> TokenCounts:
    """Counts over some parts of the responses."""
    counts = TokenCounts(*(np.zeros(vocab_size, dtype=np.int64) for _ in TokenCounts._fields))
    for name in names:
        table = read_columns(responses.join(name), ["split", "prompt_ids", "output_ids"])
        split = np.asarray(table.column("split").to_pylist())
        for total, column, wanted in (
            (counts.train_answers, "output_ids", "train"),
            (counts.train_prompts, "prompt_ids", "train"),
            (counts.held_out_answers, "output_ids", "held_out"),
            (counts.others, "prompt_ids", "held_out"),
            (counts.others, "output_ids", "validation"),
            (counts.others, "prompt_ids", "validation"),
        ):
            ids = (
                table.filter(pa.array(split == wanted, pa.bool_())).column(column).combine_chunks().flatten().to_numpy()
            )
            total += np.bincount(ids, minlength=vocab_size)
    return counts


def _count_in_tasks(responses: Location, vocab_size: int) -> TokenCounts:
    names = part_names(responses)
    groups = [names[start : start + PARTS_PER_TASK] for start in range(0, len(names), PARTS_PER_TASK)]
    # seconds of work, which arms that hold every CPU should not keep waiting
    task = ray.remote(num_cpus=0)(count_tokens)
    pending: list[ray.ObjectRef] = []
    total = TokenCounts(*(np.zeros(vocab_size, dtype=np.int64) for _ in TokenCounts._fields))
    while groups or pending:
        while groups and len(pending) < TASKS_AT_ONCE:
            pending.append(task.remote(responses, groups.pop(), vocab_size))
        done, pending = ray.wait(pending)
        total = TokenCounts(*(a + b for a, b in zip(total, ray.get(done[0]), strict=True)))
    return total


def _by_frequency(counts: np.ndarray) -> np.ndarray:
    """Ids that occur, the most frequent first, of equal ones the lowest."""
    return np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]


def _covered(counts: np.ndarray, ids: np.ndarray) -> float | None:
    """Share of the counted tokens whose id was chosen; None where nothing was counted."""
    return round(float(counts[ids].sum() / counts.sum()), 6) if counts.sum() else None
