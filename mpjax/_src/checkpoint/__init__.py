"""Checkpoints that say what they hold, and refuse to lose any of it in silence."""
