"""The public names of `mpjax.checkpoint`, and where they come from."""

from ._src.checkpoint.export import export_params, load_safetensors, save_safetensors
from ._src.checkpoint.manager import Manager
from ._src.checkpoint.state import Description, describe, restore, save
from ._src.core.base.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "Description",
    "Manager",
    "describe",
    "export_params",
    "load_safetensors",
    "restore",
    "save",
    "save_safetensors",
]
