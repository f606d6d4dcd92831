"""Memory that a training worker needs for documents, beside the head: whatever their number, it is bounded."""

from components.config import TrainConfig

KEPT_BYTES = 1e9
"""Of stored documents that stay for further epochs: a small set is read once."""
DOCUMENTS_PER_PACK = 8
"""That validation computes at once."""


def most_document_bytes(train: TrainConfig, num_workers: int, document_bytes: float) -> float:
    """Of the documents at hand and the batch that they are packed into, in a worker that keeps none.

    Args:
        train: The recipe.
        num_workers: That share a step's documents.
        document_bytes: Of the longest one.
    """
    share = -(-train.documents_per_step // num_workers)
    return 2 * max(share, DOCUMENTS_PER_PACK) * document_bytes
