"""Packages of extras: imported when they are used, and not always installed."""

import importlib
from typing import Any

# The names of packages on the index that differ from what is imported.
INSTALLED_AS = {"orbax.checkpoint": "orbax-checkpoint", "etils.epath": "etils"}
# What saving needs.
ALL = "orbax.checkpoint", "etils.epath", "tensorstore", "filelock", "xxhash"


def needed(module: str) -> Any:
    """Imports a module that mpjax.checkpoint needs; if it is missing, the error names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra = "safetensors" if module.startswith("safetensors") else "checkpoint"
        raise ImportError(
            f"mpjax.checkpoint needs the package {INSTALLED_AS.get(module, module)}, which is not "
            f"installed: pip install 'mpjax[{extra}]'."
        ) from error
