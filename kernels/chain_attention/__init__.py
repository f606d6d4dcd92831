"""Attention of draft chains over a shared prefix; see README.md for the maths."""

from kernels.chain_attention.reference import chain_attention, document_attention

__all__ = ["chain_attention", "document_attention"]
