"""Checkpoints that never lose precision without an error. See docs/checkpoints.md."""

from mpjax._src.checkpoint.manager import Manager
from mpjax._src.checkpoint.state import Description, describe, restore, save
from mpjax._src.errors import CheckpointError

__all__ = ["CheckpointError", "Description", "Manager", "describe", "restore", "save"]
