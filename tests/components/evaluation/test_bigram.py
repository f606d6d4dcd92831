import torch

from components.draft.drafting import NO_DRAFT, walked_acceptance
from components.evaluation.bigram import bigram_drafts, bigram_table


def test_the_most_frequent_successor_wins_and_the_lowest_id_breaks_ties() -> None:
    table = bigram_table([[1, 2, 1, 3, 1, 3], [5, 7, 5, 6]], vocab_size=8)

    assert table[1] == 3
    assert table[2] == 1
    assert table[5] == 6
    assert table[0] == table[4] == NO_DRAFT


def test_no_pair_crosses_two_answers() -> None:
    assert (bigram_table([[1], [2], []], vocab_size=4) == NO_DRAFT).all()
    assert (bigram_table([], vocab_size=4) == NO_DRAFT).all()


def test_drafts_follow_the_chain_and_stop_where_the_table_does() -> None:
    table = torch.tensor([1, 2, NO_DRAFT, 0])

    drafts = bigram_drafts(table, torch.tensor([9, 0, 3, 2]), num_drafts=3)

    assert drafts.tolist() == [[1, 2, NO_DRAFT], [0, 1, 2], [NO_DRAFT] * 3]


def test_its_walk_along_an_answer() -> None:
    # after 0 comes 1, after 1 comes 2, after 2 comes 0: the answer breaks the cycle once
    table = bigram_table([[0, 1, 2, 0, 1, 2]], vocab_size=4)
    text = torch.tensor([3, 0, 1, 2, 0, 2, 0])

    walk = walked_acceptance(bigram_drafts(table, text, 2), text, [(1, 7)])

    # token 0 known: 1 2 accepted; 0 known: 1 refused; 2 known: 0 accepted, the answer ends
    assert (walk.rounds, walk.accepted, walk.accepted_at_K) == (3, 3, [2, 1])
