"""Drafts equal the flat computation, and the walk counts what serving would."""

import itertools

import pytest
import torch

from components.draft.batch import Document
from components.draft.drafting import NO_DRAFT, Walk, answer_spans, greedy_drafts, walked_acceptance
from components.draft.head import DraftHead
from tests.components.draft.dense import dense_hidden, supervised, tiny_document, tiny_head

K = 3


def flat_drafts(head: DraftHead, document: Document) -> torch.Tensor:
    """[N, K] greedy drafts of every row, each anchor's chain computed as one dense attention."""
    elements = list(itertools.product(range(len(document.input_ids) - 1), range(K)))
    parameters = dict(head.named_parameters())
    hidden = dense_hidden(head.config, parameters, document, elements)
    normed = hidden / (hidden.pow(2).mean(-1, keepdim=True) + head.config.rms_norm_eps).sqrt() * head.norm.weight
    return head.target_ids_U[(normed @ head.lm_head.weight.T).argmax(-1)].view(-1, K)


@pytest.mark.parametrize("rows_per_pack", [K, 20, 4096])
def test_drafts_of_a_batch_of_three_equal_the_flat_computation(rows_per_pack: int) -> None:
    head = tiny_head()
    documents = [tiny_document(head.config, n, [(3, n)], seed=n) for n in (9, 14, 11)]
    drafts = greedy_drafts(head, documents, K, rows_per_pack=rows_per_pack, every_row=True)
    for ours, document in zip(drafts, documents, strict=True):
        assert torch.equal(ours, flat_drafts(head, document))


def test_only_anchors_of_answers_draft_and_fewer_drafts_are_the_first_columns() -> None:
    head = tiny_head()
    document = tiny_document(head.config, 14, [(3, 7), (9, 14)], seed=2)
    drafts = greedy_drafts(head, [document], K)[0]
    anchors = {a for a, d in supervised(document, 1)}
    assert {a for a in range(13) if drafts[a, 0] != NO_DRAFT} == anchors
    assert torch.equal(greedy_drafts(head, [document], 1)[0], drafts[:, :1])


def test_future_features_do_not_reach_a_draft() -> None:
    head = tiny_head()
    document = tiny_document(head.config, 12, [(3, 12)], seed=5)
    before = greedy_drafts(head, [document], K)[0]
    document.aux_hidden[7:] += 1.0
    document.input_ids[8:] = 1
    after = greedy_drafts(head, [document], K)[0]
    assert torch.equal(before[:7], after[:7])


def test_walk_by_hand() -> None:
    """Answer = tokens 3..9. From anchor 2 two hits, so next anchor 5; one hit, next 7; one hit, end."""
    ids = torch.tensor([90, 91, 92, 13, 14, 15, 16, 17, 18, 19])
    drafts = torch.full((9, 3), NO_DRAFT)
    drafts[2] = torch.tensor([14, 15, 99])
    drafts[5] = torch.tensor([17, 99, 19])
    drafts[7] = torch.tensor([19, 99, 99])
    # Anchors that the walk skips, all right: an average over anchors would count them.
    drafts[3], drafts[4], drafts[6] = ids[5:8], ids[6:9], torch.tensor([18, 19, 99])
    walk = walked_acceptance(drafts, ids, [(3, 10)])
    assert walk == Walk(rounds=3, accepted=4, accepted_at_K=[3, 1, 0])
    assert walk.acceptance_length == 1 + 4 / 3
    assert walked_acceptance(drafts, ids, [(3, 10)], 1) == Walk(3, 3, [3])


def test_oracle_accepts_every_draft() -> None:
    ids = torch.arange(30)
    drafts = torch.stack([ids[:-1] + 2 + k for k in range(K)], dim=1)
    # 24 tokens to draft after the first one known: 6 whole rounds of K + 1.
    walk = walked_acceptance(drafts, ids, [(5, 30)])
    assert (walk.rounds, walk.acceptance_length) == (6, K + 1)
    shifted = walked_acceptance(drafts + 1, ids, [(5, 30)])
    assert shifted.acceptance_length == 1.0


def test_answers_too_short_to_draft_make_no_round_and_no_rate() -> None:
    walk = walked_acceptance(torch.zeros(9, K, dtype=torch.int64), torch.zeros(10, dtype=torch.int64), [(4, 5)])
    assert walk.rounds == 0
    assert walk.acceptance_length is None


def test_walks_add_up() -> None:
    total = Walk()
    for part in (Walk(3, 4, [3, 1]), Walk(1, 0, [0, 0])):
        total.add(part)
    assert total == Walk(4, 4, [3, 1])


def test_spans_are_the_runs_of_the_mask() -> None:
    assert answer_spans(torch.tensor([1, 1, 0, 1, 0, 0, 1], dtype=torch.bool)) == [(0, 2), (3, 4), (6, 7)]
    assert answer_spans(torch.zeros(3, dtype=torch.bool)) == []


def test_more_drafts_than_made_are_refused() -> None:
    with pytest.raises(ValueError, match="num_drafts"):
        walked_acceptance(torch.zeros(3, 2), torch.zeros(4), [(1, 4)], 3)
