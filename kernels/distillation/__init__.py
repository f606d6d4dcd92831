"""Distillation losses of rows of logits, and their gradients, in one pass each; see README.md for the maths."""
