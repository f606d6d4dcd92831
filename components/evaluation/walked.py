"""Our own acceptance along the plain arm's recorded answers: the head's walked AL, to be held against vLLM's, and a bigram table's."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from components.draft.drafting import Walk, greedy_drafts, walked_acceptance
from components.draft.head import DraftHead
from components.evaluation.bigram import bigram_drafts, bigram_table
from components.evaluation.preflight import capture_document


@dataclass(frozen=True)
class RecordedAnswer:
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.output_ids

    @property
    def span(self) -> tuple[int, int]:
        """Half-open token range of the answer."""
        return len(self.prompt_ids), len(self.prompt_ids) + len(self.output_ids)


def walk_head(
    answers: Iterable[RecordedAnswer], target: PreTrainedModel, head: DraftHead, num_depths: Sequence[int]
) -> dict[int, Walk]:
    """The walk at each K of `num_depths`: all come from one pass, because the drafts for a smaller K are its first ones.

    Args:
        answers: Prompts with recorded greedy answers.
        target: In the dtype that answered.
        head: In the same dtype, on the target's device.
        num_depths: The K's.
    """
    walks = {k: Walk() for k in num_depths}
    for answer in answers:
        document = capture_document(target, answer.token_ids, head.config.aux_layers)
        drafts_NK = greedy_drafts(head, [document], max(num_depths), every_row=True)[0]
        for k, walk in walks.items():
            walk.add(walked_acceptance(drafts_NK, document.input_ids, [answer.span], k))
    return walks


def walk_bigram(
    answers: Iterable[RecordedAnswer], training_answers: Iterable[Sequence[int]], vocab_size: int, num_drafts: int
) -> Walk:
    """The same walk with the drafts of a bigram table of the training answers."""
    table = bigram_table(training_answers, vocab_size)
    walk = Walk()
    for answer in answers:
        input_ids = torch.tensor(answer.token_ids)
        walk.add(walked_acceptance(bigram_drafts(table, input_ids, num_drafts), input_ids, [answer.span]))
    return walk
