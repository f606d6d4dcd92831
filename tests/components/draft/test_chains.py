"""What is supervised, how chains are drawn and how they are cut."""

from collections.abc import Iterable
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from components.draft.batch import Document, PackedBatch
from components.draft.chains import ChainRecipe, ChainRows, Chains, sample_chains, supervised_chains
from components.draft.parts import cut_parts
from tests.components.draft.dense import supervised, tiny_config, tiny_document


def elements(batch: PackedBatch, chains: Chains) -> set[tuple[int, int, int]]:
    """(document, anchor, depth) of every supervised element, with the anchor as an index in its document."""
    found = set()
    for row, length in zip(chains.anchor_A.tolist(), chains.length_A.tolist(), strict=True):
        document, anchor = int(batch.doc_of_row_N[row]), int(batch.position_N[row])
        found |= {(document, anchor, depth) for depth in range(length + 1)}
    return found


def test_two_prompt_and_two_answer_tokens_supervise_one_element() -> None:
    """ids a b | c d: the only target is d, from the anchor at b, because c is what the server already has."""
    document = tiny_document(tiny_config(), 4, [(2, 4)], seed=0)
    batch = PackedBatch.pack([document])
    assert elements(batch, supervised_chains(batch, 4)) == {(0, 1, 0)}


def test_first_target_is_the_second_answer_token_and_the_last_token_is_a_target() -> None:
    batch = PackedBatch.pack([tiny_document(tiny_config(), 9, [(3, 8)], seed=0)])
    targets = {anchor + depth + 2 for _, anchor, depth in elements(batch, supervised_chains(batch, 3))}
    assert targets == {4, 5, 6, 7}
    assert min(anchor for _, anchor, _ in elements(batch, supervised_chains(batch, 3))) == 2


@st.composite
def packed_documents(draw: st.DrawFn) -> list[Document]:
    masks = draw(st.lists(st.lists(st.booleans(), min_size=2, max_size=14), min_size=1, max_size=4))
    config = tiny_config()
    documents = []
    for index, mask in enumerate(masks):
        document = tiny_document(config, len(mask), [], seed=index)
        documents.append(Document(document.input_ids, torch.tensor(mask), document.aux_hidden, document.last_hidden))
    return documents


@settings(max_examples=80)
@given(packed_documents(), st.integers(1, 5))
def test_supervised_elements_equal_enumeration(documents: list[Document], num_depths: int) -> None:
    """Also: no chain crosses documents, no anchor is negative, an answer from token 0 on is no exception."""
    batch = PackedBatch.pack(documents)
    expected = {(i, a, d) for i, document in enumerate(documents) for a, d in supervised(document, num_depths)}
    assert elements(batch, supervised_chains(batch, num_depths)) == expected


def test_marginal_share_of_each_depth() -> None:
    document = tiny_document(tiny_config(), 20_010, [(1, 20_010)], seed=0)
    batch = PackedBatch.pack([document])
    for ratio, floor in ((0.6, 0.0), (0.6, 0.3), (1.0, 0.0), (0.0, 0.0)):
        chains = sample_chains(batch, ChainRecipe(5, ratio, floor), [(0, 0)])
        for depth in range(1, 5):
            share = (chains.length_A >= depth).double().mean()
            # Four standard deviations of 20,000 draws.
            assert share == pytest.approx(max(ratio**depth, floor), abs=4 * 0.5 / 20_000**0.5)
        assert chains.length_A.max() <= 4


def test_draws_depend_on_the_document_alone() -> None:
    config = tiny_config()
    documents = [tiny_document(config, 30, [(2, 30)], seed=i) for i in range(3)]
    recipe = ChainRecipe(5, 0.7)
    whole = PackedBatch.pack(documents)
    together = elements(whole, sample_chains(whole, recipe, [(1, 0, i) for i in range(3)]))
    for index, document in enumerate(documents):
        alone = PackedBatch.pack([document])
        own = elements(alone, sample_chains(alone, recipe, [(1, 0, index)]))
        assert own == {(0, a, d) for i, a, d in together if i == index}
    other_epoch = elements(whole, sample_chains(whole, recipe, [(1, 1, i) for i in range(3)]))
    assert other_epoch != together


def test_rows_are_sorted_and_chains_contiguous() -> None:
    batch = PackedBatch.pack([tiny_document(tiny_config(), n, [], seed=n) for n in (7, 9)])  # rows 0..5 and 6..13
    rows = ChainRows.of(Chains(torch.tensor([2, 5, 6, 9]), torch.tensor([2, 0, 3, 1])), batch)
    assert rows.anchor_R.tolist() == [2, 2, 6, 6, 6, 9]
    assert rows.depth_R.tolist() == [1, 2, 1, 2, 3, 1]
    assert rows.position_R.tolist() == [3, 4, 1, 2, 3, 4]
    assert rows.layout.first_R.tolist() == [0, 0, 2, 2, 2, 5]
    assert rows.layout.doc_start_R.tolist() == [0, 0, 6, 6, 6, 6]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 4), max_size=30), st.integers(5, 40), st.integers(0, 9))
@example([4, 4, 4, *[0] * 27], 5, 9)
@example([0] * 30, 5, 3)
def test_parts_cover_every_anchor_once_and_respect_the_size(
    lengths: list[int], rows_per_part: int, head_start: int
) -> None:
    chains = Chains(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    parts = cut_parts(chains, rows_per_part, head_start)
    assert [i for part in parts for i in range(len(lengths))[part]] == list(range(len(lengths)))
    sizes = [sum(lengths[part]) + len(lengths[part]) for part in parts]
    assert all(size <= rows_per_part for size in sizes[1:])
    assert not sizes or sizes[0] <= rows_per_part + 2 * head_start


@settings(max_examples=60)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(5, 20), st.integers(0, 6))
def test_parts_are_few_and_the_largest_is_small(lengths: list[int], rows_per_part: int, head_start: int) -> None:
    """Against every way to cut the anchors; the first part is counted without its head start."""
    chains = Chains(torch.arange(len(lengths)), torch.tensor(lengths))
    beyond = min(head_start * (sum(lengths) + len(lengths)) // max(1, sum(lengths)), 2 * head_start)

    def largest(parts: Iterable[tuple[int, int]]) -> int:
        sizes = [sum(lengths[begin:end]) + end - begin for begin, end in parts]
        return max(sizes[0] - beyond, *sizes[1:], max(lengths) + 1)

    ways = []
    for num_cuts in range(len(lengths)):
        for cuts in combinations(range(1, len(lengths)), num_cuts):
            parts = pairwise([0, *cuts, len(lengths)])
            ways.append((num_cuts + 1, largest(parts)))
    found = cut_parts(chains, rows_per_part, head_start)
    assert (len(found), largest((part.start, part.stop) for part in found)) == min(
        way for way in ways if way[1] <= rows_per_part
    )


@pytest.mark.parametrize("changes", [{"num_depths": 0}, {"keep_ratio": 1.5}, {"keep_floor": -0.1}])
def test_recipe_outside_its_range_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        ChainRecipe(**({"num_depths": 4} | changes))


def test_features_that_are_not_finite_are_refused() -> None:
    document = tiny_document(tiny_config(), 6, [(2, 6)], seed=0)
    document.aux_hidden[3, 2] = float("nan")
    with pytest.raises(ValueError, match="document 1 "):
        PackedBatch.pack([tiny_document(tiny_config(), 6, [], seed=1), document])


def test_mask_one_shorter_than_its_ids_is_refused() -> None:
    document = tiny_document(tiny_config(), 6, [(2, 6)], seed=0)
    with pytest.raises(ValueError, match="loss_mask"):
        Document(document.input_ids, document.loss_mask[:-1], document.aux_hidden, document.last_hidden)
