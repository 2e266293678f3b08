"""Checkpoints that record their contents, and that never lose any of them silently."""
