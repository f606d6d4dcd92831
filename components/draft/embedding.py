"""An embedding of which only some rows are trained: the others cost no gradient and no optimiser state."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class TrainedRowsEmbedding(nn.Embedding):
    """`nn.Embedding` whose gradient can be confined to the ids that the training data contains.

    A row whose id never occurs gets no gradient, so Adam without weight decay never moves it; leaving it out
    changes nothing but the cost, which for a large vocabulary is most of a small head's optimiser step. With `sparse`
    the gradient has the rows that a step read and no others.
    `state_dict()` always has the one tensor `weight`, with the trained rows in place.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.rows: nn.Parameter | None = None
        self.register_buffer("row_of_V", None, persistent=False)
        self.register_state_dict_post_hook(_merge_rows)

    def train_rows(self, ids: Tensor) -> None:
        """Freezes all rows but those of `ids`; call it before the optimiser is built, the same on every rank.

        Args:
            ids: target ids, any shape, repeats allowed.
        """
        ids = ids.unique().to(self.weight.device)
        row_of_V = torch.full((self.num_embeddings,), -1, device=self.weight.device)
        row_of_V[ids] = torch.arange(ids.numel(), device=self.weight.device)
        self.row_of_V = row_of_V
        self.rows = nn.Parameter(self.merged_weight()[ids].clone())
        self.weight.requires_grad_(False)

    def merged_weight(self) -> Tensor:
        """[V, H] the whole table with the trained rows in place, detached."""
        weight_VH = self.weight.detach()
        if self.rows is None:
            return weight_VH
        ids = (self.row_of_V >= 0).nonzero()[:, 0]
        rows = self.rows.detach()
        if isinstance(rows, DTensor):  # every rank holds a share, and every rank asks
            rows = rows.full_tensor()
        return weight_VH.index_copy(0, ids, rows[self.row_of_V[ids]])

    def forward(self, input: Tensor) -> Tensor:
        if self.rows is None:
            return super().forward(input)
        row = self.row_of_V[input]
        trained = F.embedding(row.clamp(min=0), self.rows, sparse=self.sparse)
        return torch.where((row >= 0)[..., None], trained, super().forward(input))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        rows, self.rows = self.rows, None
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.rows = rows
        if rows is not None:
            with torch.no_grad():
                rows.copy_(self.weight[(self.row_of_V >= 0).nonzero()[:, 0]])


def _merge_rows(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    assert isinstance(module, TrainedRowsEmbedding)
    if module.rows is not None:
        state[prefix + "weight"] = module.merged_weight()
        del state[prefix + "rows"]
