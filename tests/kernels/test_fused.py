"""The fused attention against one dense masked softmax in fp64: in Triton's interpreter here, for real in tests/gpu."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.chain_attention import dense, fused, kernel, layout, places
from kernels.chain_attention.fused import fused_attention
from kernels.chain_attention.layout import RowLayout
from kernels.chain_attention.places import cut_places
from kernels.chain_attention.reference import reference_document_attention
from tests.kernels.test_chain_attention import Rows, chain_rows, error, inputs, rows_of, run
from tests.kernels.test_chain_attention import dense as exact_attention

FP32_TOLERANCE = 2e-6
FP16_TOLERANCE = 2e-3


def attend(*tensors: Tensor | None, layout: RowLayout, **kwargs: object) -> Tensor:
    return fused_attention(*tensors, layout, tensors[0].shape[-1] ** -0.5, **kwargs)


def check(rows: Rows, tensors: list[Tensor], tolerance: float) -> None:
    out, grads = run(attend, tensors, layout=rows.layout())
    exact, exact_grads = run(exact_attention, [tensor.double() for tensor in tensors], rows)
    assert out.dtype == tensors[0].dtype
    for ours, theirs in zip([out, *grads], [exact, *exact_grads], strict=True):
        assert error(ours, theirs) < tolerance


@settings(max_examples=15, deadline=None)
@given(chain_rows())
def test_any_chains(rows: Rows) -> None:
    check(rows, inputs(rows, 4, 2, 16, torch.float32), FP32_TOLERANCE)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FP32_TOLERANCE), (torch.float16, FP16_TOLERANCE)])
def test_head_sizes_of_real_models(dim: int, dtype: torch.dtype, tolerance: float) -> None:
    rows = rows_of([[3, 0, 7, 1] * 4, [1], [7] * 5], 7)
    check(rows, inputs(rows, 6, 2, dim, dtype), tolerance)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 1)])
def test_grouped_queries_and_rows_around_a_tile(heads: tuple[int, int]) -> None:
    """129 rows: one more than a tile; the last document has one token, some have no chain."""
    rows = rows_of([[2] * 60, [0, 0, 0], [1, 0, 2, 2, 2, 1], [1]], 2)
    assert len(rows.anchor) == 129
    check(rows, inputs(rows, *heads, 16, torch.float32), FP32_TOLERANCE)


def test_no_rows() -> None:
    rows = rows_of([[0, 0, 0]], 1)
    out, grads = run(attend, inputs(rows, 2, 1, 16, torch.float32), layout=rows.layout())
    assert out.shape == (0, 2, 16)
    assert (grads[1] == 0).all()


def test_buffers_of_earlier_parts_are_added_to() -> None:
    rows = rows_of([[2, 0, 3, 1], [0, 3, 2]], 3)
    tensors = inputs(rows, 4, 2, 16, torch.float32)
    _, exact = run(exact_attention, [tensor.double() for tensor in tensors], rows)
    buffers = (torch.ones_like(tensors[1]), torch.ones_like(tensors[2]))
    for _ in range(2):
        _, grads = run(attend, tensors, layout=rows.layout(), prefix_grads=buffers)
        assert grads[1] is None
        assert grads[2] is None
    assert error(buffers[0] - 1, 2 * exact[1]) < FP32_TOLERANCE
    assert error(buffers[1] - 1, 2 * exact[2]) < FP32_TOLERANCE


def test_what_nobody_sees_and_what_memory_held_may_be_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of([[0, 2, 1, 0, 0], [0, 0], [1, 0]], 2)
    unseen = [3, 4, 5, 6, 8]
    tensors = inputs(rows, 2, 1, 16, torch.float32)
    clean, clean_grads = run(attend, tensors, layout=rows.layout())
    for tensor in tensors[1:3]:
        tensor[unseen] = float("nan")
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **kwargs: empty_like(x, **kwargs).fill_(float("nan")))
    out, grads = run(attend, tensors, layout=rows.layout())
    assert torch.equal(out, clean)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(grads, clean_grads, strict=True))


def test_documents_are_causal_inside() -> None:
    doc_rows = [5, 1, 40, 18]
    layout = RowLayout.of_documents(doc_rows)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(64, heads, 16, generator=generator) for heads in (4, 2, 2))
    out, grads = run(lambda *x: attend(*x, None, None, layout=layout), [q, k, v])
    exact, exact_grads = run(
        lambda *x: reference_document_attention(*x, doc_rows), [tensor.double() for tensor in (q, k, v)]
    )
    for ours, theirs in zip([out, *grads], [exact, *exact_grads], strict=True):
        assert error(ours, theirs) < FP32_TOLERANCE


def plain_scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf) if causal else scores


def plain_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = plain_scores(q, k, scale, causal)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def plain_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k_all, v_all = (x.repeat_interleave(group, 1) for x in (k, v))
    probs = (plain_scores(q, k_all, scale, causal) - lse[..., None]).exp()
    dscores = probs * (torch.einsum("qhd,khd->hqk", dout, v_all) - (dout * out).sum(-1).T[..., None])
    dk = torch.einsum("hqk,qhd->khd", dscores, q) * scale
    dv = torch.einsum("hqk,qhd->khd", probs, dout)
    return (
        torch.einsum("hqk,khd->qhd", dscores, k_all) * scale,
        dk.unflatten(1, (-1, group)).sum(2),
        dv.unflatten(1, (-1, group)).sum(2),
    )


@pytest.mark.parametrize("chains", [True, False])
def test_blocks_of_rows_over_keys_that_all_see(monkeypatch: pytest.MonkeyPatch, chains: bool) -> None:
    """The split between cuDNN and Triton, with plain PyTorch in cuDNN's place."""
    monkeypatch.setattr(fused, "can_be_dense", lambda q: True)
    monkeypatch.setattr(layout, "cut_blocks", partial(dense.cut_blocks, block_rows=(8, 4), block_keys=4, min_keys=4))
    monkeypatch.setattr(layout, "causal_blocks", partial(dense.causal_blocks, min_keys=20))
    monkeypatch.setattr(dense, "block_forward", plain_forward)
    monkeypatch.setattr(dense, "block_backward", plain_backward)
    rows = rows_of([[3, 0, 2, 1] * 5, [2], [2, 2, 1] * 7], 3)
    tensors = inputs(rows, 4, 2, 16, torch.float32)
    if chains:
        covered = sum(block.rows.stop - block.rows.start for block in rows.layout().blocks)
        assert 0.5 * len(rows.anchor) < covered < len(rows.anchor)
        check(rows, tensors, FP32_TOLERANCE)
        return
    doc_rows = [20, 1, 7, 14]
    q = torch.cat([tensors[0]] * 2)[:42]
    out, grads = run(lambda *x: attend(*x, None, None, layout=RowLayout.of_documents(doc_rows)), [q, *tensors[1:3]])
    exact, exact_grads = run(
        lambda *x: reference_document_attention(*x, doc_rows), [x.double() for x in (q, *tensors[1:3])]
    )
    for ours, theirs in zip([out, *grads], [exact, *exact_grads], strict=True):
        assert error(ours, theirs) < FP32_TOLERANCE


def test_a_block_never_holds_a_key_that_one_of_its_rows_does_not_see() -> None:
    rows = rows_of([[3] * 500, [1, 0, 2] * 400], 3)
    anchor, _, start = rows.tensors()
    blocks = dense.cut_blocks(rows.anchor, rows.doc_start, block_rows=(256, 64), block_keys=32, min_keys=64)
    assert len(blocks) > 6
    for block in blocks:
        assert int(start[block.rows].max()) == int(start[block.rows].min()) == block.keys.start
        assert block.keys.stop - 1 <= int(anchor[block.rows].min())
        assert block.keys.stop - block.keys.start >= 64
    assert all(a.rows.stop <= b.rows.start for a, b in pairwise(blocks))
    for block in blocks:
        start[block.rows] = block.keys.stop
    assert (start.diff() >= 0).all()  # the kernel finds the rows of a key by bisection


def ask_the_same(rows: Rows, tensors: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The tensors with equal queries at each place of a document, and the place of each row."""
    anchor, first, doc_start = rows.tensors()
    at = anchor + torch.arange(len(anchor)) - first + 1
    place = torch.stack([doc_start, at], 1).unique(dim=0, return_inverse=True)[1]
    return [tensors[0][place], *tensors[1:]], place


def take_places(monkeypatch: pytest.MonkeyPatch, multiple: int = 4, min_keys: int = 3) -> None:
    """Places for small documents too, with plain PyTorch in cuDNN's place."""
    monkeypatch.setattr(fused, "can_be_dense", lambda q: True)
    monkeypatch.setattr(fused, "can_share", lambda q: True)
    monkeypatch.setattr(layout, "cut_places", partial(cut_places, multiple=multiple, min_keys=min_keys))
    monkeypatch.setattr(dense, "CAUSAL_ROWS", multiple)
    monkeypatch.setattr(dense, "block_forward", plain_forward)
    monkeypatch.setattr(dense, "block_backward", plain_backward)


def check_places(rows: Rows, tensors: list[Tensor]) -> None:
    """Output and gradients, those of the queries summed over each place."""
    tensors, place = ask_the_same(rows, tensors)
    out, grads = run(attend, tensors, layout=rows.layout(), equal_queries=True)
    exact, exact_grads = run(exact_attention, [tensor.double() for tensor in tensors], rows)
    for found in (grads, exact_grads):
        found[0] = torch.zeros_like(found[0]).index_add_(0, place, found[0])
    for ours, theirs in zip([out, *grads], [exact, *exact_grads], strict=True):
        assert error(ours, theirs) < FP32_TOLERANCE


def test_what_equal_queries_see_together_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two documents with places, one that is too short for them, places that no row has, and parts of a document."""
    take_places(monkeypatch)
    rows = rows_of([[3, 3, 2, 0, 3] * 5, [2], [0] * 9 + [3, 3, 1, 0, 0, 0, 0, 3, 3, 3] * 3], 3)
    found = rows.layout().places
    assert [block.causal for block in found.blocks] == [True, False, True]
    assert len(found.asked_A) < len(found.row_Y)
    assert (found.place_R < 0).any()
    check_places(rows, inputs(rows, 4, 2, 16, torch.float32))


@settings(max_examples=15, deadline=None)
@given(chain_rows(), st.sampled_from([1, 2, 8]), st.integers(1, 6))
def test_any_places(rows: Rows, multiple: int, min_keys: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        take_places(monkeypatch, multiple, min_keys)
        monkeypatch.setattr(places, "WORTH", 100.0)
        check_places(rows, inputs(rows, 4, 2, 16, torch.float32))


@settings(max_examples=60, deadline=None)
@given(chain_rows(), st.integers(1, 8))
def test_the_rows_of_a_tile_of_keys(rows: Rows, tile: int) -> None:
    """Of places, whose starts do not ascend: all that see a key of the tile, and none that sees not all where it says so."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        take_places(monkeypatch, multiple=1, min_keys=1)
        monkeypatch.setattr(places, "WORTH", 100.0)
        edge = rows.layout().places_edge
    if edge is None:
        return
    row = torch.arange(len(rows.anchor))
    bounds = kernel.key_tile_bounds(edge, rows.num_prefix, tile).tolist()
    for begin, (some, every, every_end, some_end) in zip(range(0, rows.num_prefix, tile), bounds, strict=True):
        last = min(begin + tile, rows.num_prefix) - 1
        sees_some = (edge.start_R <= last) & (edge.anchor_R >= begin) & (edge.start_R <= edge.anchor_R)
        sees_all = (edge.start_R <= begin) & (edge.anchor_R >= last)
        assert ((row >= some) & (row < some_end))[sees_some].all()
        assert sees_all[(row >= every) & (row < every_end)].all()


def test_places_without_a_gradient_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    take_places(monkeypatch)
    rows = rows_of([[3] * 30], 3)
    tensors, _ = ask_the_same(rows, inputs(rows, 2, 1, 16, torch.float32))
    leaves = [tensor.requires_grad_() for tensor in tensors]
    attend(*leaves, layout=rows.layout(), equal_queries=True)[:20].sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    assert (leaves[3].grad[20:] == 0).all()


def test_few_rows_a_place_are_not_worth_it() -> None:
    sparse = rows_of([[0] * 600 + [1, 0] * 300], 2)
    assert sparse.layout().places is None
    full = rows_of([[2] * 1200], 2).layout()
    found = full.places
    assert found.member_YM.shape == (1280, 2)
    assert [block.causal for block in found.blocks] == [True]
    assert (full.places_edge.start_R >= 0).all()
    assert (full.places_edge.floor_R <= full.places_edge.start_R).all()
    assert (full.places_edge.ceiling_R >= full.places_edge.start_R).all()
