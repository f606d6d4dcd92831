"""The partition computes the flat N x K gradients, whatever the parts, the packing and the ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from components.draft.batch import Document, PackedBatch
from components.draft.chains import ChainRecipe, Chains, sample_chains, supervised_chains
from components.draft.head import DraftHead
from components.draft.losses import Teacher
from components.draft.parts import cut_parts
from components.draft.passes import prefix_pass
from components.draft.schedule import StepOptions, accumulate_gradients, measure
from tests.components.draft.dense import dense_loss, supervised, tiny_config, tiny_document, tiny_head, tiny_teacher

NUM_DEPTHS = 4
# fp64 sums in another order.
FP64_TOLERANCE = 1e-12
# bf16 products carry 8 bits; measured up to 1.2% of a gradient's norm over two layers, loss and attention.
BF16_TOLERANCE = 0.03


def documents() -> list[Document]:
    config = tiny_config()
    return [
        tiny_document(config, 19, [(5, 12), (15, 19)], seed=1),
        tiny_document(config, 12, [(0, 9)], seed=2),
    ]


def sampled(batch: PackedBatch, recipe: ChainRecipe | None = None) -> Chains:
    recipe = recipe or ChainRecipe(NUM_DEPTHS, 0.7)
    return sample_chains(batch, recipe, [(7, index) for index in range(len(batch.doc_lengths))])


def partition_gradients(
    head: DraftHead, docs: list[Document], chains: Chains, options: StepOptions
) -> tuple[dict[str, Tensor], float]:
    head.zero_grad()
    sums = accumulate_gradients(head, PackedBatch.pack(docs), chains, tiny_teacher(head.config), options)
    return {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}, float(sums.loss)


def dense_gradients(
    head: DraftHead, docs: list[Document], chains: Chains, kind: str = "kl"
) -> tuple[dict[str, Tensor], float]:
    """Gradients of the flat computation; packed rows are turned back into (document, anchor)."""
    head.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    lengths = dict(zip(chains.anchor_A.tolist(), chains.length_A.tolist(), strict=True))
    offset = 0
    for document in docs:
        rows = len(document.input_ids) - 1
        own = {row - offset: length for row, length in lengths.items() if offset <= row < offset + rows}
        loss = loss + dense_loss(head, document, own, tiny_teacher(head.config), NUM_DEPTHS, kind)
        offset += rows
    loss.backward()
    return {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}, loss.item()


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        error = (ours[name].double() - gradient).norm() / gradient.norm()
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
@pytest.mark.parametrize(("kind", "recompute"), [("kl", False), ("kl", True), ("cross_entropy", False)])
def test_gradients_equal_flat_computation(num_parts: int, kind: str, recompute: bool) -> None:
    head, docs = tiny_head(), documents()
    chains = sampled(PackedBatch.pack(docs))
    assert (chains.length_A == 0).any()
    rows = {1: 1000, 2: 20, 3: 14, 7: 6}[num_parts]
    assert len(cut_parts(chains, rows)) == num_parts
    options = StepOptions(NUM_DEPTHS, rows, loss=kind, recompute_prefix=recompute)
    ours, loss = partition_gradients(head, docs, chains, options)
    flat, flat_loss = dense_gradients(head, docs, chains, kind)
    assert loss == pytest.approx(flat_loss, rel=FP64_TOLERANCE)
    assert_close(ours, flat, FP64_TOLERANCE)


def test_gradients_with_whole_vocabulary_one_layer_and_all_rows() -> None:
    config = tiny_config(draft_vocab_size=61, num_layers=1, num_kv_heads=4, aux_layers=(1, 3))
    head = tiny_head(config)
    docs = [tiny_document(config, 14, [(3, 14)], seed=4)]
    chains = supervised_chains(PackedBatch.pack(docs), NUM_DEPTHS)
    ours, _ = partition_gradients(head, docs, chains, StepOptions(NUM_DEPTHS, 9))
    assert_close(ours, dense_gradients(head, docs, chains)[0], FP64_TOLERANCE)


def test_bf16_autocast_stays_near_the_flat_fp64_gradients() -> None:
    docs = documents()
    chains = sampled(PackedBatch.pack(docs))
    flat, flat_loss = dense_gradients(tiny_head(), docs, chains)
    options = StepOptions(NUM_DEPTHS, 13, autocast=torch.bfloat16)
    ours, loss = partition_gradients(tiny_head().float(), docs, chains, options)
    assert loss == pytest.approx(flat_loss, rel=BF16_TOLERANCE)
    assert all(gradient.dtype == torch.float32 for gradient in ours.values())
    assert_close(ours, flat, BF16_TOLERANCE)


def test_packed_equals_unpacked() -> None:
    head, docs = tiny_head(), documents()
    batch = PackedBatch.pack(docs)
    packed, loss = partition_gradients(head, docs, sampled(batch), StepOptions(NUM_DEPTHS, 11))
    head.zero_grad()
    alone = 0.0
    for index, document in enumerate(docs):
        single = PackedBatch.pack([document])
        chains = sample_chains(single, ChainRecipe(NUM_DEPTHS, 0.7), [(7, index)])
        alone += float(
            accumulate_gradients(head, single, chains, tiny_teacher(head.config), StepOptions(NUM_DEPTHS, 11)).loss
        )
    assert loss == pytest.approx(alone, rel=FP64_TOLERANCE)
    assert_close(packed, {name: p.grad for name, p in head.named_parameters()}, FP64_TOLERANCE)


def test_counts_and_hits() -> None:
    head, docs = tiny_head(), documents()
    batch = PackedBatch.pack(docs)
    chains = supervised_chains(batch, NUM_DEPTHS)
    elements = [element for document in docs for element in supervised(document, NUM_DEPTHS)]
    sums = measure(head, batch, chains, tiny_teacher(head.config), StepOptions(NUM_DEPTHS, 8))
    assert sums.count_D.tolist() == [sum(d == depth for _, d in elements) for depth in range(NUM_DEPTHS)]
    draftable = set(head.target_ids_U.tolist())
    outside = [
        sum(
            int(doc.input_ids[a + d + 2]) not in draftable
            for doc in docs
            for a, d in supervised(doc, NUM_DEPTHS)
            if d == depth
        )
        for depth in range(NUM_DEPTHS)
    ]
    assert sums.outside_D.tolist() == outside
    assert sums.count == len(elements)


def test_measure_equals_the_training_sums() -> None:
    head, docs = tiny_head(), documents()
    batch = PackedBatch.pack(docs)
    chains, teacher, options = sampled(batch), tiny_teacher(head.config), StepOptions(NUM_DEPTHS, 8)
    trained, measured = (f(head, batch, chains, teacher, options) for f in (accumulate_gradients, measure))
    assert torch.equal(trained.loss, measured.loss)
    assert torch.equal(trained.correct_D, measured.correct_D)


def test_batch_without_a_supervised_token_has_no_gradient() -> None:
    head = tiny_head()
    batch = PackedBatch.pack([tiny_document(head.config, 9, [], seed=3)])
    chains = supervised_chains(batch, NUM_DEPTHS)
    sums = accumulate_gradients(head, batch, chains, tiny_teacher(head.config), StepOptions(NUM_DEPTHS, 8))
    assert sums.count == 0
    assert sums.loss == 0
    assert all(parameter.grad is None for parameter in head.parameters())


def test_anchor_larger_than_a_part_is_refused() -> None:
    head, docs = tiny_head(), documents()
    batch = PackedBatch.pack(docs)
    chains = supervised_chains(batch, NUM_DEPTHS)
    with pytest.raises(ValueError, match="rows_per_part"):
        accumulate_gradients(head, batch, chains, tiny_teacher(head.config), StepOptions(NUM_DEPTHS, 3))


def test_graph_of_a_step_shrinks_with_the_part() -> None:
    """Bytes that autograd holds at once for the chain rows, at one fixed batch."""
    config = tiny_config()
    batch = PackedBatch.pack([tiny_document(config, 120, [(8, 120)], seed=5)])
    whole, half, eighth = (peak_saved_bytes(tiny_head(config), batch, rows) for rows in (1_000, 220, 55))
    assert half < 0.75 * whole
    assert eighth < 0.5 * whole


def test_recomputing_keeps_less_of_the_prefix_pass() -> None:
    batch = PackedBatch.pack([tiny_document(tiny_config(), 200, [], seed=5)])
    kept, inputs_only = 0, 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved):
        prefix_pass(tiny_head(), batch)
        whole, kept = kept, 0
        prefix_pass(tiny_head(), batch, recompute=True)
        inputs_only = kept
    assert inputs_only < 0.5 * whole


def peak_saved_bytes(head: DraftHead, batch: PackedBatch, rows_per_part: int) -> int:
    """Largest total of tensors saved for a backward and not yet released."""
    live: dict[int, int] = {}
    peak = 0

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal peak
            self.tensor = tensor
            live[id(self)] = tensor.numel() * tensor.element_size()
            peak = max(peak, sum(live.values()))

        def __del__(self) -> None:
            live.pop(id(self), None)

    chains = supervised_chains(batch, NUM_DEPTHS)
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        accumulate_gradients(head, batch, chains, tiny_teacher(head.config), StepOptions(NUM_DEPTHS, rows_per_part))
    return peak


def test_two_ranks_equal_one_even_when_one_has_nothing_to_learn(tmp_path: Path) -> None:
    mp.spawn(write_rank_gradients, args=(str(tmp_path),), nprocs=2)
    for index, split in enumerate(RANK_SPLITS):
        alone, count = step_gradients([document for rank in split for document in rank])
        for rank in range(2):
            reduced = torch.load(tmp_path / f"{index}-{rank}.pt")
            assert_close(reduced, {name: gradient / count for name, gradient in alone.items()}, FP64_TOLERANCE)


# Document numbers of each rank; document 2 has no supervised token.
RANK_SPLITS = [[[0], [1]], [[1, 0], [2]]]


def step_gradients(numbers: list[int]) -> tuple[dict[str, Tensor], Tensor]:
    docs = [*documents(), tiny_document(tiny_config(), 9, [], seed=3)]
    head, batch = tiny_head(), PackedBatch.pack([docs[number] for number in numbers])
    chains = sample_chains(batch, ChainRecipe(NUM_DEPTHS, 0.7), [(7, number) for number in numbers])
    sums = accumulate_gradients(head, batch, chains, tiny_teacher(head.config), StepOptions(NUM_DEPTHS, 9))
    zeros = {name: torch.zeros_like(parameter) for name, parameter in head.named_parameters()}
    return zeros | {name: p.grad for name, p in head.named_parameters() if p.grad is not None}, sums.count


def write_rank_gradients(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for index, split in enumerate(RANK_SPLITS):
        gradients, count = step_gradients(split[rank])
        dist.all_reduce(count)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= count
        torch.save(gradients, f"{folder}/{index}-{rank}.pt")
    dist.destroy_process_group()


def test_teacher_norm_is_applied_once() -> None:
    """A teacher that forgot the final norm would give another loss."""
    head, docs = tiny_head(), documents()
    batch, teacher = PackedBatch.pack(docs), tiny_teacher(tiny_config())
    chains, options = sampled(batch), StepOptions(NUM_DEPTHS, 9)
    flat = Teacher(torch.ones_like(teacher.norm_T), teacher.norm_eps, teacher.lm_head_UT)
    assert measure(head, batch, chains, teacher, options).loss != measure(head, batch, chains, flat, options).loss
