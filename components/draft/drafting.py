"""Drafts of a head along recorded answers, and the acceptance that serving would see.

A hit is the *recorded* token: what the target wrote when the answer was made, not the argmax of a later feature
pass (about 1% of greedy tokens differ between the two).

Legend: N depth-0 rows of a document (its tokens less one), A anchors, E elements, K drafts a round, U draft vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from components.draft.batch import Document, PackedBatch
from components.draft.chains import ChainRows, Chains, supervised_chains
from components.draft.head import DraftHead
from components.draft.losses import best_drafts
from components.draft.parts import cut_parts
from components.draft.passes import chain_pass, prefix_pass

NO_DRAFT = -1


@dataclass
class Walk:
    """Acceptance along answers, as sums."""

    rounds: int = 0
    accepted: int = 0
    accepted_at_K: list[int] = field(default_factory=list)
    """Rounds that accepted at least 1, 2, ..., K drafts."""

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / rounds, the walked AL; None without a round."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    def add(self, other: "Walk") -> None:
        """Adds another walk's sums (the same K, or an empty walk)."""
        self.rounds += other.rounds
        self.accepted += other.accepted
        pad = [0] * max(0, len(other.accepted_at_K) - len(self.accepted_at_K))
        theirs = other.accepted_at_K + [0] * (len(self.accepted_at_K) - len(other.accepted_at_K))
        self.accepted_at_K = [a + b for a, b in zip(self.accepted_at_K + pad, theirs, strict=True)]


@torch.no_grad()
def greedy_drafts(
    head: DraftHead,
    documents: Sequence[Document],
    num_drafts: int,
    *,
    rows_per_pack: int = 4096,
    autocast: torch.dtype | None = None,
    every_row: bool = False,
) -> list[Tensor]:
    """The K tokens that the server would draft at each anchor, given the recorded text up to token a + 1.

    All K come from one pass (depth 0 and K - 1 mask rows), so the drafts for a smaller K are the first columns.

    Args:
        head: the head.
        documents: recorded sequences; `last_hidden` is not read and may have width 0.
        num_drafts: K.
        rows_per_pack: most depth-0 rows (of more than one document) and most elements computed at once.
        autocast: bf16 to draft as training computes; None for the parameters' dtype.
        every_row: draft at every depth-0 row, not only where an answer goes on.

    Returns:
        One [N, K] tensor of target ids a document; row a holds the drafts for tokens a + 2, a + 3, ...,
        and -1 where nothing was drafted.

    Raises:
        ValueError: `rows_per_pack` is below K, or features are not finite.
    """
    drafts: list[Tensor] = []
    for group in _packs(documents, rows_per_pack):
        batch = PackedBatch.pack(group, head.fc.weight.device)
        with torch.autocast(batch.device.type, dtype=autocast, enabled=autocast is not None):
            drafts_NK = _pack_drafts(head, batch, num_drafts, rows_per_pack, autocast, every_row)
        drafts += drafts_NK.split(list(batch.doc_rows))
    return drafts


def answer_spans(loss_mask: Tensor) -> list[tuple[int, int]]:
    """Half-open token ranges of a document's answers: the runs of its loss mask."""
    edges = torch.diff(loss_mask.int(), prepend=torch.zeros(1).int(), append=torch.zeros(1).int())
    return list(zip((edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist(), strict=True))


def walked_acceptance(
    drafts_NK: Tensor, input_ids: Tensor, spans: Iterable[tuple[int, int]], num_drafts: int | None = None
) -> Walk:
    """Walks each answer as serving would: accept the l leading hits at anchor a, go on at a + l + 1.

    A walk starts at the last prompt token and makes a round as long as a recorded token is left to draft, so
    hits end with the answer; vLLM also counts drafts accepted past the end token in an answer's last round.

    Args:
        drafts_NK: [N, K] target ids per depth-0 row, from `greedy_drafts`.
        input_ids: [N + 1] the recorded tokens.
        spans: half-open token ranges of the answers.
        num_drafts: walk with fewer drafts than K.

    Returns:
        The sums over all answers.

    Raises:
        ValueError: more drafts asked for than there are.
    """
    num_drafts = drafts_NK.shape[1] if num_drafts is None else num_drafts
    if not 1 <= num_drafts <= drafts_NK.shape[1]:
        raise ValueError(f"num_drafts: {num_drafts} is not in [1, {drafts_NK.shape[1]}]")
    drafts, ids = drafts_NK.tolist(), input_ids.tolist()
    walk = Walk(accepted_at_K=[0] * num_drafts)
    for start, end in spans:
        anchor = max(start - 1, 0)
        while anchor + 2 < end:
            hits = _leading_hits(drafts[anchor][:num_drafts], ids[anchor + 2 : end])
            walk.rounds += 1
            walk.accepted += hits
            for position in range(hits):
                walk.accepted_at_K[position] += 1
            anchor += hits + 1
    return walk


def _leading_hits(drafts: list[int], tokens: list[int]) -> int:
    hits = 0
    for draft, token in zip(drafts, tokens, strict=False):
        if draft != token:
            break
        hits += 1
    return hits


def _packs(documents: Sequence[Document], max_rows: int) -> Iterator[list[Document]]:
    pack: list[Document] = []
    rows = 0
    for document in documents:
        if pack and rows + len(document.input_ids) - 1 > max_rows:
            yield pack
            pack, rows = [], 0
        pack.append(document)
        rows += len(document.input_ids) - 1
    if pack:
        yield pack


def _pack_drafts(
    head: DraftHead,
    batch: PackedBatch,
    num_drafts: int,
    rows_per_pack: int,
    autocast: torch.dtype | None,
    every_row: bool,
) -> Tensor:
    num_rows = len(batch.token_N)
    anchor_A = torch.arange(num_rows, device=batch.device) if every_row else supervised_chains(batch, 1).anchor_A
    chains = Chains(anchor_A, torch.full_like(anchor_A, num_drafts - 1))
    drafts_NK = torch.full((num_rows, num_drafts), NO_DRAFT, device=batch.device)
    prefix = prefix_pass(head, batch)
    for part in cut_parts(chains, rows_per_pack):
        rows = ChainRows.of(chains[part], batch).to(batch.device)
        hidden_EH = torch.cat([prefix.hidden_NH[anchor_A[part]], chain_pass(head, rows, prefix)])
        depth_E = torch.cat([torch.zeros_like(anchor_A[part]), rows.depth_R])
        anchor_E = torch.cat([anchor_A[part], rows.anchor_R])
        best_E = best_drafts(head.norm(hidden_EH), head.lm_head.weight, autocast)
        drafts_NK[anchor_E, depth_E] = head.target_ids_U[best_E]
    return drafts_NK
