"""Checkpoints that never lose precision without an error. See docs/checkpoints.md."""

from typing import TYPE_CHECKING

from mpjax._src.base.errors import CheckpointError, suggesting
from mpjax._src.checkpoint.manager import Manager
from mpjax._src.checkpoint.state import Description, describe, restore, save

__all__ = ["CheckpointError", "Description", "Manager", "describe", "restore", "save"]

if not TYPE_CHECKING:  # type checkers refuse other names by themselves
    __getattr__ = suggesting(__name__, __all__)
