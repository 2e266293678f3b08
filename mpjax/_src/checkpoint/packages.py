"""Packages of extras: imported when they are used, and not always installed."""

import importlib
from typing import Any

# The names of packages on the index that differ from what is imported.
INSTALLED_AS = {"orbax.checkpoint": "orbax-checkpoint", "etils.epath": "etils"}
ALL = "orbax.checkpoint", "etils.epath", "tensorstore", "filelock", "xxhash"


def all_needed() -> None:
    """Raises an ImportError if a package that saving needs is missing."""
    for module in ALL:
        needed(module)


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
