"""The drafter to beat: after each token, the token that followed it most often in the training answers."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from components.draft.drafting import NO_DRAFT


def bigram_table(answers: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """[vocab_size] the most frequent successor of each token; `NO_DRAFT` where it was never followed by any.

    Args:
        answers: Token ids of the training answers; no pair crosses from one to the next.
        vocab_size: Of the target.
    """
    pairs = [torch.as_tensor(ids[:-1]).long() * vocab_size + torch.as_tensor(ids[1:]).long() for ids in answers]
    table = torch.full((vocab_size,), NO_DRAFT)
    if not pairs:
        return table
    seen, counts = torch.cat(pairs).unique(return_counts=True)
    seen = seen[counts.argsort(stable=True, descending=True)]  # of equal counts the lowest successor comes first
    seen = seen[(seen // vocab_size).argsort(stable=True)]
    first = seen // vocab_size
    best = first.diff(prepend=first.new_tensor([-1])) != 0
    table[first[best]] = seen[best] % vocab_size
    return table


def bigram_drafts(table: Tensor, input_ids: Tensor, num_drafts: int) -> Tensor:
    """[n - 1, K] drafts at each anchor a of a text of n tokens: the table's chain that starts at token a + 1."""
    columns = []
    token = input_ids[1:]
    for _ in range(num_drafts):
        token = torch.where(token == NO_DRAFT, NO_DRAFT, table[token.clamp(min=0)])
        columns.append(token)
    return torch.stack(columns, dim=1)
