"""Attention of draft chains over a shared prefix; see README.md for the maths."""

from kernels.chain_attention.attention import chain_attention, document_attention
from kernels.chain_attention.layout import RowLayout

__all__ = ["RowLayout", "chain_attention", "document_attention"]
