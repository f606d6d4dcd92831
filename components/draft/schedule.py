"""The exact partition: one prefix pass, the chain passes of the parts one after another, one prefix backward.

Depth-0 rows never see chain rows, and chains of different anchors never see each other. So keys and values of
the prefix become leaves, each part runs forward, loss and backward into them, and the prefix pass runs backward
once from what the leaves gathered. The gradients are those of the flat N x K computation; memory is the prefix
pass and one part (design.md, section 5).

Legend: N depth-0 rows, A supervised anchors, R chain rows, E elements of a part (depth-0 rows first), H width,
D depths.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from components.draft.batch import PackedBatch
from components.draft.chains import Chains
from components.draft.head import DraftHead
from components.draft.losses import LossKind, Teacher, distillation_loss, rows_per_chunk
from components.draft.parts import Part, Parts
from components.draft.passes import MaskRow, Prefix, chain_pass, prefix_pass


@dataclass(frozen=True)
class StepOptions:
    """How a step computes; only `loss` changes what it computes."""

    num_depths: int
    """K_train; the counts have one entry a depth."""

    rows_per_part: int
    """Most elements whose graph exists at once, besides the prefix pass and the first part's `head_start`."""

    loss: LossKind = "kl"
    autocast: torch.dtype | None = None
    """bf16 for mixed precision over fp32 parameters; None computes in the parameters' dtype."""

    recompute_prefix: bool = False
    """Activation checkpointing of the prefix pass."""

    head_start: int = 0
    """Chain rows that the first part may have beyond the others: it comes before the gradients exist."""


@dataclass
class StepSums:
    """Sums over the supervised elements of a batch; divide once, after summing over batches and ranks."""

    loss: Tensor
    """Sum of the losses."""

    count_D: Tensor
    """[D] supervised elements at each depth."""

    correct_D: Tensor
    """[D] of those, the ones whose best draft is the recorded token."""

    outside_D: Tensor
    """[D] of those, the ones whose recorded token is outside the draft vocabulary."""

    @classmethod
    def zeros(cls, num_depths: int, device: torch.device | str = "cpu") -> "StepSums":
        counts = torch.zeros(3, num_depths, dtype=torch.int64, device=device)
        return cls(torch.zeros((), dtype=torch.float64, device=device), *counts)

    @property
    def count(self) -> Tensor:
        return self.count_D.sum()

    def add(self, other: "StepSums") -> None:
        self.loss += other.loss
        self.count_D += other.count_D
        self.correct_D += other.correct_D
        self.outside_D += other.outside_D


@dataclass
class _Leaves:
    """The prefix as the parts see it: cut from its graph, with fp32 buffers for what flows back."""

    prefix: Prefix
    normed_AH: Tensor
    normed_grad_AH: Tensor
    key_value_grads: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, prefix: Prefix, normed_AH: Tensor) -> "_Leaves":
        pairs = [(k.detach(), v.detach()) for k, v in zip(prefix.keys, prefix.values, strict=True)]
        mask_row = MaskRow(*map(_summing_leaf, prefix.mask_row))
        cut = prefix._replace(keys=[k for k, _ in pairs], values=[v for _, v in pairs], mask_row=mask_row)
        grads = [(_zero_sums(k), _zero_sums(v)) for k, v in pairs]
        return cls(cut, normed_AH.detach(), torch.zeros_like(normed_AH), grads)


def prepare_parts(head: DraftHead, batch: PackedBatch, chains: Chains, options: StepOptions) -> Parts:
    """The parts of a batch's chains on the batch's device, for `accumulate_gradients`.

    Raises:
        ValueError: one anchor has more elements than `rows_per_part`.
    """
    chunk_rows = rows_per_chunk(head.config.draft_vocab_size, batch.device)
    return Parts.of(chains, batch, options.rows_per_part, chunk_rows, options.head_start).to(batch.device)


def accumulate_gradients(
    head: DraftHead, batch: PackedBatch, chains: Chains | Parts, teacher: Teacher, options: StepOptions
) -> StepSums:
    """Adds the gradients of the *sum* of all losses to the parameters' `grad`.

    Nothing is divided and nothing is reduced over ranks: that is one division by the global number of supervised
    elements after the last batch of a step. A batch without a supervised element leaves the gradients alone, but for
    those of a head under FSDP: there every rank must run every prefix pass, and every parameter gets a gradient.

    Args:
        head: the head; its parameters may be fp32 under bf16 autocast, or all of one dtype.
        batch: packed documents.
        chains: the supervised anchors and their chain lengths, or what `prepare_parts` made of them.
        teacher: the target's output layer over the draft vocabulary.
        options: see `StepOptions`.

    Returns:
        The sums over the batch. A loss that is not finite has made the gradients so too.

    Raises:
        ValueError: one anchor has more elements than `rows_per_part`.
    """
    sums = StepSums.zeros(options.num_depths, batch.device)
    if isinstance(chains, Chains):
        chains = prepare_parts(head, batch, chains, options)
    if not chains.parts and not isinstance(head, FSDPModule):
        return sums
    with _autocast(batch, options):
        prefix = head(batch, options.recompute_prefix)
        normed_AH = head.norm(prefix.hidden_NH[chains.anchor_A])
    leaves = _Leaves.of(prefix, normed_AH)
    for part in chains.parts:
        leaf_AH = leaves.normed_AH[part.anchors].requires_grad_()
        with _autocast(batch, options):
            loss, part_sums = _part_loss(head, batch, part, leaves, leaf_AH, teacher, options)
        loss.backward()
        leaves.normed_grad_AH[part.anchors] = leaf_AH.grad
        sums.add(part_sums)
    if isinstance(head, FSDPModule):  # it reduces at the end of the next backward, the same tensors on every rank
        for parameter in head.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    _prefix_backward(prefix, normed_AH, leaves)
    return sums


@torch.no_grad()
def measure(head: DraftHead, batch: PackedBatch, chains: Chains, teacher: Teacher, options: StepOptions) -> StepSums:
    """The same sums as `accumulate_gradients`, without gradients (validation)."""
    sums = StepSums.zeros(options.num_depths, batch.device)
    if len(chains) == 0:
        return sums
    parts = prepare_parts(head, batch, chains, options)
    with _autocast(batch, options):
        prefix = prefix_pass(head, batch)
        leaves = _Leaves.of(prefix, head.norm(prefix.hidden_NH[parts.anchor_A]))
        for part in parts.parts:
            leaf_AH = leaves.normed_AH[part.anchors]
            sums.add(_part_loss(head, batch, part, leaves, leaf_AH, teacher, options)[1])
    return sums


def _part_loss(
    head: DraftHead,
    batch: PackedBatch,
    part: Part,
    leaves: _Leaves,
    normed_AH: Tensor,
    teacher: Teacher,
    options: StepOptions,
) -> tuple[Tensor, StepSums]:
    """Chain pass of one part, and the loss of its anchors' elements at every depth."""
    chain_RH = head.norm(chain_pass(head, part.rows, leaves.prefix, leaves.key_value_grads))
    target_E = head.draft_ids(batch.input_ids_T[part.drafted_E])
    result = distillation_loss(
        torch.cat([normed_AH, chain_RH]), head.lm_head.weight, teacher, batch.last_hidden_TH, part.taught, target_E,
        kind=options.loss, product_dtype=options.autocast,
    )  # fmt: skip
    depth_E = part.depth_E
    which = (torch.ones_like(result.hit_R), result.hit_R, target_E < 0)
    counts = (depth_E.new_zeros(options.num_depths).scatter_add_(0, depth_E, found.long()) for found in which)
    return result.loss_sum, StepSums(result.loss_R.detach().double().sum(), *counts)


def _prefix_backward(prefix: Prefix, normed_AH: Tensor, leaves: _Leaves) -> None:
    """One backward of the prefix pass from its own loss and from what the parts left in the leaves."""
    outputs, grads = [normed_AH], [leaves.normed_grad_AH]
    for key, value, (dkey, dvalue) in zip(prefix.keys, prefix.values, leaves.key_value_grads, strict=True):
        outputs += [key, value]
        grads += [dkey.to(key.dtype), dvalue.to(value.dtype)]
    for output, leaf in zip(prefix.mask_row, leaves.prefix.mask_row, strict=True):
        if leaf.grad is not None:
            outputs.append(output)
            grads.append(leaf.grad.to(output.dtype))
    torch.autograd.backward(outputs, grads)


def _summing_leaf(tensor: Tensor) -> Tensor:
    """A leaf whose `grad` sums over parts in at least fp32."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).requires_grad_()


def _zero_sums(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _autocast(batch: PackedBatch, options: StepOptions) -> torch.autocast:
    return torch.autocast(batch.device.type, dtype=options.autocast, enabled=options.autocast is not None)
