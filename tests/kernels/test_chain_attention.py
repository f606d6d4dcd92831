"""`chain_attention` against one dense masked softmax in fp64, output and every gradient."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.chain_attention import RowLayout, chain_attention, document_attention
from kernels.chain_attention.reference import reference_attention

FP64_TOLERANCE = 1e-12
# Inputs are rounded to bf16 before both computations; what is left is the rounding of outputs and gradients.
BF16_TOLERANCE = 5e-3


class Rows(NamedTuple):
    anchor: list[int]
    first: list[int]
    doc_start: list[int]
    num_prefix: int
    max_chain: int

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        anchor, first, doc_start = (torch.tensor(x, dtype=torch.int64) for x in self[:3])
        return anchor, first, doc_start

    def layout(self) -> RowLayout:
        return RowLayout.of_chains(*self.tensors(), self.max_chain, self.num_prefix)


def rows_of(chains: list[list[int]], max_chain: int) -> Rows:
    """One list of chain lengths a document, one length a prefix row."""
    anchor: list[int] = []
    first: list[int] = []
    doc_start: list[int] = []
    offset = 0
    for lengths in chains:
        for index, length in enumerate(lengths):
            first += [len(first)] * length
            anchor += [offset + index] * length
            doc_start += [offset] * length
        offset += len(lengths)
    return Rows(anchor, first, doc_start, offset, max_chain)


def dense(q: Tensor, k_prefix: Tensor, v_prefix: Tensor, k_chain: Tensor, v_chain: Tensor, rows: Rows) -> Tensor:
    """The predicate as an [R, N + R] mask."""
    anchor, first, doc_start = rows.tensors()
    prefix_id, row_id = torch.arange(rows.num_prefix), torch.arange(len(q))
    sees_prefix = (prefix_id >= doc_start[:, None]) & (prefix_id <= anchor[:, None])
    sees_chain = (row_id >= first[:, None]) & (row_id <= row_id[:, None])
    group = q.shape[1] // k_prefix.shape[1]
    k, v = (torch.cat(x).repeat_interleave(group, 1) for x in ((k_prefix, k_chain), (v_prefix, v_chain)))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    mask = torch.cat([sees_prefix, sees_chain], 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


def inputs(rows: Rows, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    num = len(rows.anchor)
    shapes = [(num, heads, dim), *[(rows.num_prefix, kv_heads, dim)] * 2, *[(num, kv_heads, dim)] * 2]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def run(function: object, tensors: list[Tensor], *args: object, **kwargs: object) -> tuple[Tensor, list[Tensor | None]]:
    """Output and the gradients of a fixed random functional of it."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*leaves, *args, **kwargs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out * weights.to(out.dtype)).sum().backward()
    return out.detach(), [leaf.grad for leaf in leaves]


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / max(float(exact.norm()), 1e-30))


@st.composite
def chain_rows(draw: st.DrawFn) -> Rows:
    max_chain = draw(st.integers(1, 5))
    length = st.integers(0, max_chain)
    return rows_of(draw(st.lists(st.lists(length, min_size=1, max_size=9), min_size=1, max_size=4)), max_chain)


@settings(max_examples=120, deadline=None)
@given(chain_rows(), st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]), st.sampled_from([1, 5, 8]), st.integers(1, 20))
def test_output_and_gradients_equal_dense_softmax(
    rows: Rows, heads: tuple[int, int], dim: int, chunk_rows: int
) -> None:
    tensors = inputs(rows, *heads, dim)
    out, grads = run(reference_attention, tensors, rows.layout(), dim**-0.5, chunk_rows=chunk_rows)
    exact, exact_grads = run(dense, tensors, rows)
    assert error(out, exact) < FP64_TOLERANCE
    for ours, theirs in zip(grads, exact_grads, strict=True):
        assert error(ours, theirs) < FP64_TOLERANCE


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_bf16_at_the_head_sizes_of_real_models(dim: int) -> None:
    rows = rows_of([[3, 0, 7, 1] * 9, [7] * 23], 7)
    tensors = inputs(rows, 6, 2, dim, torch.bfloat16)
    out, grads = run(reference_attention, tensors, rows.layout(), dim**-0.5, chunk_rows=37)
    exact, exact_grads = run(dense, [tensor.double() for tensor in tensors], rows)
    for ours, theirs in zip([out, *grads], [exact, *exact_grads], strict=True):
        assert ours.dtype == torch.bfloat16
        assert error(ours, theirs) < BF16_TOLERANCE


def test_prefix_gradients_of_several_calls_gather_in_the_buffers() -> None:
    rows = rows_of([[2, 0, 3, 1], [0, 3, 2]], 3)
    tensors = inputs(rows, 4, 2, 8)
    _, exact = run(chain_attention, tensors, rows.layout())
    buffers = (torch.zeros_like(tensors[1]), torch.zeros_like(tensors[1]))
    for _ in range(2):
        _, grads = run(chain_attention, tensors, rows.layout(), prefix_grads=buffers)
        assert grads[1] is None
        assert grads[2] is None
        assert all(torch.equal(grads[i], exact[i]) for i in (0, 3, 4))
    assert error(buffers[0], 2 * exact[1]) < FP64_TOLERANCE
    assert error(buffers[1], 2 * exact[2]) < FP64_TOLERANCE


def test_rows_that_nobody_sees_may_hold_nan() -> None:
    """Prefix rows after a document's last anchor, and whole documents without a chain."""
    rows = rows_of([[0, 2, 1, 0, 0], [0, 0], [1, 0]], 2)
    unseen = [3, 4, 5, 6, 8]
    tensors = inputs(rows, 2, 1, 8)
    clean, clean_grads = run(chain_attention, tensors, rows.layout())
    for tensor in tensors[1:3]:
        tensor[unseen] = float("nan")
    out, grads = run(chain_attention, tensors, rows.layout())
    assert torch.equal(out, clean)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(grads, clean_grads, strict=True))
    assert (grads[1][unseen] == 0).all()


def test_no_rows() -> None:
    rows = rows_of([[0, 0, 0]], 1)
    out, grads = run(chain_attention, inputs(rows, 2, 1, 4), rows.layout())
    assert out.shape == (0, 2, 4)
    assert (grads[1] == 0).all()


def test_autocast_does_not_reach_the_sums() -> None:
    rows = rows_of([[2, 1, 2, 0]], 2)
    tensors = inputs(rows, 2, 1, 16, torch.float32)
    plain, _ = run(chain_attention, tensors, rows.layout())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = run(chain_attention, tensors, rows.layout())
    assert torch.equal(plain, cast)


def test_saved_memory_does_not_grow_with_rows_times_prefix() -> None:
    """What autograd keeps is linear in the rows: no probabilities."""
    saved: dict[int, int] = {}
    for size in (40, 80):
        rows = rows_of([[3] * size], 3)
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            leaves = [tensor.requires_grad_() for tensor in inputs(rows, 2, 1, 8)]
            chain_attention(*leaves, rows.layout())
        saved[size] = total
    assert saved[80] == 2 * saved[40]


VALID = rows_of([[2, 0, 3], [1, 2]], 3)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("anchor_R", {"anchor": [2, 2, 0, 0, 0, 3, 4, 4]}),
        ("anchor_R", {"anchor": [0, 0, 2, 2, 2, 3, 9, 9]}),
        ("anchor_R", {"anchor": [-1, -1, 2, 2, 2, 3, 4, 4]}),
        ("anchor_R", {"anchor": [0, 0, 2]}),
        ("first_R", {"first": [0, 0, 2, 2, 4, 5, 6, 6]}),
        ("first_R", {"first": [0, 0, 0, 0, 0, 5, 6, 6]}),
        ("doc_start_R", {"doc_start": [0, 0, 3, 3, 3, 3, 3, 3]}),
        ("doc_start_R", {"doc_start": [0, 0, 2, 2, 2, 1, 1, 1]}),
        ("doc_start_R", {"doc_start": [0, 0, 0, 1, 1, 3, 3, 3]}),
        ("max_chain", {"max_chain": 2}),
        ("max_chain", {"max_chain": 0}),
    ],
)
def test_rows_in_another_order_are_refused(name: str, changes: dict[str, object]) -> None:
    tensors = inputs(VALID, 2, 1, 4)
    broken = VALID._replace(**changes)
    with pytest.raises(ValueError, match=rf"^{name}"):
        chain_attention(*tensors, broken.layout())


@pytest.mark.parametrize(
    ("name", "index", "shape"),
    [
        ("q_RHD", 0, (8, 4)),
        ("q_RHD", 0, (8, 3, 4)),
        ("k_prefix_NHD", 1, (5, 2, 6)),
        ("v_prefix_NHD", 2, (4, 2, 4)),
        ("k_chain_RHD", 3, (7, 2, 4)),
        ("v_chain_RHD", 4, (8, 4, 4)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, index: int, shape: tuple[int, ...]) -> None:
    tensors = inputs(VALID, 4, 2, 4)
    tensors[index] = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"^{name}"):
        chain_attention(*tensors, VALID.layout())


def test_mixed_dtypes_are_refused() -> None:
    tensors = inputs(VALID, 4, 2, 4)
    tensors[3] = tensors[3].float()
    with pytest.raises(ValueError, match=r"^k_chain_RHD"):
        chain_attention(*tensors, VALID.layout())


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
def test_document_attention_is_causal_inside_each_document(heads: tuple[int, int]) -> None:
    doc_rows = [5, 1, 8]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(14, h, 8, generator=generator, dtype=torch.float64) for h in (heads[0], *[heads[1]] * 2))
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(doc_rows))
    order = torch.arange(14)
    mask = (document[:, None] == document) & (order[:, None] >= order)
    k_all, v_all = (x.repeat_interleave(heads[0] // heads[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k_all) * 8**-0.5
    exact = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v_all)
    assert error(document_attention(q, k, v, doc_rows), exact) < FP64_TOLERANCE
    with pytest.raises(ValueError, match=r"^doc_rows"):
        document_attention(q, k, v, [5, 8])
