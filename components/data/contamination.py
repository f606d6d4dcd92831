"""Prompts for training that repeat a prompt of an evaluation: its text, nearly its text, or a long passage of it.

Compared are the user turns, without system turns and tool results, word by word (`components.data.similarity`). A prompt
repeats an evaluation prompt when one of these holds:

- equal: the words of all its user turns, or of one of its turns that has at least five, are those of all of the other's turns, or of
  the other's first turn if that has at least five: what an evaluation asks later ("make it shorter, please") is nobody's own;
- alike: the Jaccard similarity of their sets of word triples reaches `data.near_similarity`;
- overlap: of the evaluation prompt's runs of 13 words it has at least half. The runs of 13 words are those of GPT-3's
  check (Brown et al. 2020, appendix C). A run that more than ten evaluation prompts or more than ten training prompts
  have is wording of a template and does not count.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from components.data.prompts import Prompt
from components.data.said import Said
from components.data.similarity import SHINGLE_WORDS, NearIndex, grams, words

RUN_WORDS = 13
LEAST_TURN_WORDS = 5
LEAST_COMMON_SHARE = 0.5
MOST_PROMPTS_OF_A_RUN = 10

Turns = list[list[str]]
"""The words of each user turn."""


def find_repeats(
    prompts: Sequence[Prompt], evaluation: Sequence[Prompt], similarity: float, read_ids: Callable[[list[int]], Said]
) -> dict[str, str]:
    """Which prompts repeat one of `evaluation`: their keys, each with how and which.

    Args:
        prompts: Those that are trained on.
        evaluation: Those that are measured with.
        similarity: Jaccard similarity from which two prompts are alike.
        read_ids: What a prompt that is given as ids says.
    """
    if not evaluation:
        return {}
    index = _EvaluationIndex([(prompt, _turns(prompt, read_ids)) for prompt in evaluation], similarity)
    suspects = [prompt for prompt in prompts if index.may_repeat(_turns(prompt, read_ids))]
    common = Counter(run for prompt in suspects for run in index.common_runs(_turns(prompt, read_ids)))
    index.forget_runs({run for run, count in common.items() if count > MOST_PROMPTS_OF_A_RUN})
    found = ((prompt.key, index.find(_turns(prompt, read_ids))) for prompt in suspects)
    return {key: detail for key, detail in found if detail}


class _EvaluationIndex:
    def __init__(self, evaluation: list[tuple[Prompt, Turns]], similarity: float) -> None:
        self._places = [f"{prompt.source}:{prompt.line}" for prompt, _ in evaluation]
        self._similarity, self._near = similarity, NearIndex(similarity)
        self._whole: dict[tuple[str, ...], int] = {}
        self._with_run: dict[int, list[int]] = {}
        shingles = [grams(_joined(turns), SHINGLE_WORDS) for _, turns in evaluation]
        self._shingles = np.unique(np.concatenate(shingles))
        for number, (_, turns) in enumerate(evaluation):
            self._near.add(number, shingles[number])
            for text in _comparable(turns):
                self._whole.setdefault(text, number)
            for run in _runs(turns):
                self._with_run.setdefault(run, []).append(number)
        self.forget_runs({run for run, owners in self._with_run.items() if len(owners) > MOST_PROMPTS_OF_A_RUN})

    def may_repeat(self, turns: Turns) -> bool:
        """False only where `find` finds nothing: a quick look that spares most prompts the long one."""
        shingles = grams(_joined(turns), SHINGLE_WORDS)
        num_common = np.isin(shingles, self._shingles, assume_unique=True).sum()
        # A share of what is common to both is at most the share of what is common to all; a run holds 11 shingles.
        is_near = num_common >= self._similarity * len(shingles) or num_common > RUN_WORDS - SHINGLE_WORDS
        return bool(is_near) or any(text in self._whole for text in _askings(turns))

    def common_runs(self, turns: Turns) -> list[int]:
        return [run for run in _runs(turns) if run in self._with_run]

    def forget_runs(self, runs: set[int]) -> None:
        for run in runs:
            del self._with_run[run]
        self._num_runs = Counter(number for owners in self._with_run.values() for number in owners)

    def find(self, turns: Turns) -> str | None:
        """How these turns repeat an evaluation prompt, in words; None if they do not."""
        equal = next((self._whole[text] for text in _askings(turns) if text in self._whole), None)
        if equal is not None:
            return f"equal to {self._places[equal]}"
        near: tuple[Any, float] | None = self._near.find(grams(_joined(turns), SHINGLE_WORDS))
        if near is not None:
            return f"{near[1]:.2f} like {self._places[near[0]]}"
        return self._overlap(turns)

    def _overlap(self, turns: Turns) -> str | None:
        hits = Counter(number for run in self.common_runs(turns) for number in self._with_run[run])
        shares = {number: count / self._num_runs[number] for number, count in hits.items()}
        most = max(shares, key=lambda number: shares[number], default=None)
        if most is None or shares[most] < LEAST_COMMON_SHARE:
            return None
        return f"{shares[most]:.0%} of the runs of {RUN_WORDS} words of {self._places[most]}"


def _turns(prompt: Prompt, read_ids: Callable[[list[int]], Said]) -> Turns:
    if prompt.ids is not None:
        return [words(turn) for turn in read_ids(prompt.ids).turns]
    return [words(message["content"]) for message in prompt.messages if message["role"] == "user"]


def _joined(turns: Turns) -> list[str]:
    return [word for turn in turns for word in turn]


def _comparable(turns: Turns) -> list[tuple[str, ...]]:
    """The texts of an evaluation prompt that another may equal; a text without a word equals nothing."""
    return _askings(turns, most_turns=1)


def _askings(turns: Turns, most_turns: int | None = None) -> list[tuple[str, ...]]:
    """All turns together, and each of the first so many that is long enough to be somebody's own."""
    single = [tuple(turn) for turn in turns[:most_turns] if len(turn) >= LEAST_TURN_WORDS]
    return [text for text in (tuple(_joined(turns)), *single) if text]


def _runs(turns: Turns) -> list[int]:
    long = [grams(turn, RUN_WORDS) for turn in turns if len(turn) >= RUN_WORDS]
    return np.unique(np.concatenate(long)).tolist() if long else []
