"""The fused attention on a real GPU, against the plain reference in fp64 and against FlexAttention's mask.

Without the project's other requirements: `python -m pytest --noconftest tests/gpu`.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kernels.chain_attention import RowLayout, chain_attention, document_attention
from kernels.chain_attention.reference import reference_attention, reference_document_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 5e-6}
MAX_CHAIN = 7


def make_layout(lengths: list[list[int]]) -> RowLayout:
    """One list of chain lengths a document, one length a prefix row."""
    length = torch.tensor([x for document in lengths for x in document], device="cuda")
    rows = torch.tensor([len(document) for document in lengths], device="cuda")
    start_N = torch.repeat_interleave(rows.cumsum(0) - rows, rows)
    anchor_R = torch.repeat_interleave(torch.arange(len(length), device="cuda"), length)
    first_R = (length.cumsum(0) - length)[anchor_R]
    return RowLayout.of_chains(anchor_R, first_R, start_N[anchor_R], MAX_CHAIN, len(length))


def random_lengths(num_rows: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, MAX_CHAIN + 1, (num_rows,), generator=generator).tolist()


PACKED = [random_lengths(3000, 0), [2], random_lengths(61, 1), [0, 0, 0], [MAX_CHAIN] * 1300]
"""The long documents have blocks for cuDNN, the short ones have none."""


def make_tensors(layout: RowLayout, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    rows, prefix = layout.num_rows, layout.num_prefix
    shapes = [(rows, heads[0]), (prefix, heads[1]), (prefix, heads[1]), (rows, heads[1]), (rows, heads[1])]
    return [torch.randn(*shape, dim, generator=generator, device="cuda").to(dtype) for shape in shapes]


def run(function: object, tensors: list[Tensor], *args: object, **kwargs: object) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*leaves, *args, **kwargs)
    generator = torch.Generator("cuda").manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator, device="cuda").to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def worst(ours: list[Tensor], exact: list[Tensor]) -> float:
    errors = [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(ours, exact, strict=True)]
    return max(float(error) for error in errors)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_output_and_gradients(dtype: torch.dtype, dim: int, heads: tuple[int, int], deterministic: bool) -> None:
    layout = make_layout(PACKED)
    assert {block.keys.start for block in layout.blocks} == {0, 3065}  # of both long documents
    tensors = make_tensors(layout, heads, dim, dtype)
    ours = run(chain_attention, tensors, layout, deterministic=deterministic)
    exact = run(reference_attention, [x.double() for x in tensors], layout, dim**-0.5)
    assert worst(ours, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("begin", [0, 1100])
def test_equal_queries(begin: int, dim: int, heads: tuple[int, int]) -> None:
    """Of whole documents, and of a part that begins within one."""
    long, *others = PACKED
    layout = make_layout([[0] * begin + long[begin:], *others])
    assert layout.places is not None
    assert {block.causal for block in layout.places.blocks} == ({True} if begin == 0 else {False, True})
    depth_R = torch.arange(layout.num_rows, device="cuda") - layout.first_R + 1
    place = torch.stack([layout.doc_start_R, layout.anchor_R + depth_R], 1).unique(dim=0, return_inverse=True)[1]
    q, *others = make_tensors(layout, heads, dim, torch.bfloat16)
    tensors = [q[place], *others]
    ours = run(chain_attention, tensors, layout, equal_queries=True)
    exact = run(reference_attention, [x.double() for x in tensors], layout, dim**-0.5)
    for found in (ours, exact):
        found[1] = torch.zeros_like(found[1], dtype=torch.float64).index_add_(0, place, found[1].double())
    assert worst(ours, exact) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_documents(dtype: torch.dtype, deterministic: bool) -> None:
    doc_rows = [1500, 1, 61, 4, 700]
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = [torch.randn(sum(doc_rows), h, 128, generator=generator, device="cuda").to(dtype) for h in (8, 2, 2)]
    ours = run(document_attention, tensors, doc_rows, deterministic=deterministic)
    exact = run(reference_document_attention, [x.double() for x in tensors], doc_rows)
    assert worst(ours, exact) < TOLERANCE[dtype]


def test_deterministic_means_equal_bits() -> None:
    layout = make_layout(PACKED)
    tensors = make_tensors(layout, (8, 2), 128, torch.bfloat16)
    first, second = (run(chain_attention, tensors, layout, deterministic=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_parts_add_up_in_the_buffers() -> None:
    whole = make_layout([[3] * 900])
    tensors = make_tensors(whole, (8, 2), 64, torch.bfloat16)
    exact = run(reference_attention, [x.double() for x in tensors], whole, 64**-0.5)
    buffers = tuple(torch.zeros_like(x, dtype=torch.float32) for x in tensors[1:3])
    for begin, end in ((0, 300), (300, 301), (301, 900)):
        part = make_layout([[3 if begin <= i < end else 0 for i in range(900)]])
        rows = slice(3 * begin, 3 * end)
        q, k, v, k_chain, v_chain = tensors
        generator = torch.Generator("cuda").manual_seed(1)
        dout = torch.randn(q.shape, generator=generator, device="cuda").to(q.dtype)[rows]
        leaves = [x.clone().requires_grad_() for x in (q[rows], k, v, k_chain[rows], v_chain[rows])]
        chain_attention(*leaves, part, prefix_grads=buffers).backward(dout)
        assert leaves[1].grad is None
    assert worst(list(buffers), exact[2:4]) < TOLERANCE[torch.bfloat16]


def test_equals_flex_attention_over_the_flat_mask() -> None:
    layout = make_layout([random_lengths(400, 2)])
    q, k, v, k_chain, v_chain = make_tensors(layout, (4, 2), 64, torch.float32)
    n = layout.num_prefix
    anchor = torch.cat([torch.arange(n, device="cuda"), layout.anchor_R])
    depth_R = torch.arange(layout.num_rows, device="cuda") - layout.first_R + 1
    depth = torch.cat([torch.zeros(n, device="cuda", dtype=torch.int64), depth_R])

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        prefix = (depth[k] == 0) & (anchor[k] <= anchor[q])
        return prefix | ((anchor[k] == anchor[q]) & (depth[k] <= depth[q]))

    mask = create_block_mask(sees, None, None, len(anchor), len(anchor), device="cuda")
    queries = torch.cat([torch.zeros_like(q[:1]).expand(n, -1, -1), q])
    flat = [x.transpose(0, 1)[None].double() for x in (queries, torch.cat([k, k_chain]), torch.cat([v, v_chain]))]
    flex = flex_attention(*flat, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)[n:]
    ours = chain_attention(q, k, v, k_chain, v_chain, layout)
    assert worst([ours], [flex]) < TOLERANCE[torch.float32]
