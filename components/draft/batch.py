"""Documents packed one after another, and the depth-0 rows that a head makes of them.

Legend: T tokens of all documents, N depth-0 rows (T less one a document), X = aux layers * target hidden
size, H target hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.chain_attention.layout import send


@dataclass(frozen=True)
class Document:
    """One sequence and its recorded features."""

    input_ids: Tensor
    """[n] target ids."""

    loss_mask: Tensor
    """[n] True at tokens of answers."""

    aux_hidden: Tensor
    """[n, X] residual streams entering the aux layers, concatenated."""

    last_hidden: Tensor
    """[n, H] the target's last residual stream, before its final norm."""

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("input_ids", "loss_mask", "aux_hidden", "last_hidden")}
        if len(set(lengths.values())) != 1 or self.input_ids.dim() != 1:
            raise ValueError(f"a document's tensors have different numbers of tokens: {lengths}")
        if len(self.input_ids) < 2:
            raise ValueError(f"a document needs at least 2 tokens, got {len(self.input_ids)}")

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors."""
        return sum(t.nbytes for t in (self.input_ids, self.loss_mask, self.aux_hidden, self.last_hidden))


@dataclass(frozen=True)
class PackedBatch:
    """Several documents in one row of tokens. Depth-0 row i of a document pairs token i+1 with feature i."""

    input_ids_T: Tensor
    loss_mask_T: Tensor
    aux_hidden_TX: Tensor
    last_hidden_TH: Tensor
    doc_lengths: tuple[int, ...]
    """Tokens of each document."""

    @classmethod
    def pack(cls, documents: Sequence[Document], device: torch.device | str = "cpu") -> "PackedBatch":
        """Packs documents.

        Raises:
            ValueError: no document, or a document with NaN or infinite features (it says which).
        """
        if not documents:
            raise ValueError("documents: a batch needs at least one")
        for index, document in enumerate(documents):
            if not (document.aux_hidden.isfinite().all() and document.last_hidden.isfinite().all()):
                raise ValueError(f"documents: features of document {index} are not all finite")
        return cls(
            input_ids_T=torch.cat([doc.input_ids.long() for doc in documents]).to(device),
            loss_mask_T=torch.cat([doc.loss_mask.bool() for doc in documents]).to(device),
            aux_hidden_TX=torch.cat([doc.aux_hidden for doc in documents]).to(device),
            last_hidden_TH=torch.cat([doc.last_hidden for doc in documents]).to(device),
            doc_lengths=tuple(len(doc.input_ids) for doc in documents),
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.input_ids_T, self.loss_mask_T, self.aux_hidden_TX, self.last_hidden_TH

    def outline(self) -> "PackedBatch":
        """The same documents on the CPU and without features: all that drawing chains needs."""
        nothing = self.aux_hidden_TX[:, :0].cpu()
        return PackedBatch(self.input_ids_T.cpu(), self.loss_mask_T.cpu(), nothing, nothing, self.doc_lengths)

    def pin_memory(self) -> "PackedBatch":
        """In host memory from which a GPU copies by itself."""
        return self._map(Tensor.pin_memory)

    def to(self, device: torch.device | str) -> "PackedBatch":
        """On another device, with the indices that the prefix pass reads: worked out here, they do not make a GPU wait."""
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=True))
        for name in ("token_N", "position_N"):
            moved.__dict__[name] = send(getattr(self, name), torch.device(device))
        return moved

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tells the allocator that `stream` reads what another one wrote."""
        for tensor in (*self._tensors, self.token_N, self.position_N):
            tensor.record_stream(stream)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "PackedBatch":
        input_ids_T, loss_mask_T, aux_hidden_TX, last_hidden_TH = map(function, self._tensors)
        return PackedBatch(input_ids_T, loss_mask_T, aux_hidden_TX, last_hidden_TH, self.doc_lengths)

    def places_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of some depth-0 rows: the index of their feature among the packed tokens, and the first row of their document.

        Worked out where the rows are, which may be the CPU while the batch is on a GPU.
        """
        ends = torch.tensor(self.doc_rows, device=rows.device).cumsum(0)
        document = torch.searchsorted(ends, rows, right=True)
        return rows + document, F.pad(ends, (1, 0))[document]

    @cached_property
    def doc_rows(self) -> tuple[int, ...]:
        """Depth-0 rows of each document: the last token has no next token to pair with."""
        return tuple(length - 1 for length in self.doc_lengths)

    @cached_property
    def doc_of_row_N(self) -> Tensor:
        """[N] the document of each depth-0 row."""
        rows = torch.tensor(self.doc_rows, device=self.device)
        numbers = torch.arange(len(rows), device=self.device)
        return torch.repeat_interleave(numbers, rows, output_size=sum(self.doc_rows))  # told, a GPU need not be asked

    @cached_property
    def token_N(self) -> Tensor:
        """[N] index in the packed tokens of each depth-0 row's feature."""
        return torch.arange(sum(self.doc_rows), device=self.device) + self.doc_of_row_N

    @cached_property
    def doc_start_N(self) -> Tensor:
        """[N] first depth-0 row of each row's document."""
        rows = torch.tensor(self.doc_rows, device=self.device)
        return (rows.cumsum(0) - rows)[self.doc_of_row_N]

    @cached_property
    def position_N(self) -> Tensor:
        """[N] position id of each depth-0 row: the feature's index in its document."""
        return torch.arange(len(self.doc_start_N), device=self.device) - self.doc_start_N

    @cached_property
    def answer_T(self) -> Tensor:
        """[T] number of the answer that a token belongs to, from 1 on; 0 outside answers.

        An answer is a run of supervised tokens inside one document.
        """
        mask_T = self.loss_mask_T
        begins_T = mask_T.clone()
        begins_T[1:] &= ~mask_T[:-1]
        starts = torch.tensor(self.doc_lengths, device=self.device).cumsum(0)[:-1]
        begins_T[starts] = mask_T[starts]
        return begins_T.cumsum(0) * mask_T

    @property
    def device(self) -> torch.device:
        return self.input_ids_T.device
