"""Checkpoints that cannot change precision by stealth. See docs/checkpoints.md."""

from mpjax._src.checkpoint.state import Description, describe, restore, save
from mpjax._src.errors import CheckpointError

__all__ = ["CheckpointError", "Description", "describe", "restore", "save"]
