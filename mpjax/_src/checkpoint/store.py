"""Arrays and plain data in a directory, written and read by orbax; the one module that imports it.

A checkpoint is a directory of two items: ``state``, a flat dict from path to array, and ``about``,
a JSON file. Nothing in it is code, and nothing of it is run.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.checkpoint.contents import (
    FORMAT,
    FORMAT_VERSION,
    describe,
    is_held,
    leaves_of,
)
from mpjax._src.checkpoint.convert import held
from mpjax._src.errors import CheckpointError
from mpjax._src.trees import is_key

TABLES = {"leaves": dict, "kinds": dict}


def orbax() -> Any:
    """Imports orbax.checkpoint, which takes a second and is not always installed."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "mpjax.checkpoint is built on orbax-checkpoint, which is not installed: "
            "pip install 'mpjax[checkpoint]'."
        ) from error
    return orbax.checkpoint


def saved_form(state: Any, policy: str | None, data: Any) -> Any:
    """Returns what orbax is told to write: arrays by path, and what is said of them."""
    ocp = orbax()
    about = describe(state, policy, _checked(data))
    # orbax writes no empty arrays, nor an item without any; their shape says everything. Keys are
    # written as their data.
    arrays = {
        leaf.path: jax.random.key_data(leaf.value) if is_key(leaf.value) else _array(leaf.value)
        for leaf in leaves_of(state)
        if np.size(leaf.value)
    }
    args = ocp.args
    state_item = {"state": args.PyTreeSave(arrays)} if arrays else {}
    return args.Composite(about=args.JsonSave(about), **state_item)


def _array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else np.asarray(jnp.asarray(value))


def _checked(data: Any) -> Any:
    """Returns data that JSON gives back as it was."""
    try:
        same = json.loads(json.dumps(data, allow_nan=False)) == data
    except (TypeError, ValueError) as error:
        raise ValueError(f"data={data!r} cannot be written as JSON: {error}.") from None
    if not same:
        raise ValueError(
            f"data={data!r} does not come back from JSON as it was. Legal are dicts with string "
            "keys, lists (no tuples), strings, numbers, True, False and None."
        )
    return data


def _path(directory: str | Path) -> Any:
    from etils import epath  # orbax's, which reads buckets too

    return epath.Path(absolute(directory))


def exists(directory: str | Path) -> bool:
    """Tells whether there is something of this name."""
    orbax()
    return _path(directory).exists()


def write(directory: str | Path, args: Any) -> None:
    """Writes a checkpoint: whole under its name, or not at all."""
    ocp = orbax()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(absolute(directory), args=args)


def read_about(directory: str | Path) -> dict[str, Any]:
    """Reads and checks what was written beside the arrays.

    Raises:
        FileNotFoundError: If there is no such directory.
        CheckpointError: If it is no checkpoint of mpjax's, or a damaged one.
    """
    ocp = orbax()
    path = _path(directory)
    if not path.is_dir():
        raise FileNotFoundError(f"directory={str(directory)!r}: there is no such checkpoint.")
    steps = [p.name for p in path.iterdir() if p.name.isdigit()]
    if steps and not (path / "about").exists():
        raise CheckpointError(
            f"{directory}: this is the directory of a Manager, with the checkpoints of the steps "
            f"{', '.join(sorted(steps, key=int)[:10])}. Name one of them: "
            f"{str(path / max(steps, key=int))!r}."
        )
    if not (path / "about").exists():
        raise CheckpointError(
            f"{directory}: this is no checkpoint of mpjax's, or its file about/metadata is gone. "
            f"It holds {sorted(p.name for p in path.iterdir())[:10]}."
        )
    args = ocp.args.Composite(about=ocp.args.JsonRestore())
    about = _restore(path, args, path / "about" / "metadata").about
    _check_about(about, path / "about" / "metadata")
    return about


def _check_about(about: Any, file: Any) -> None:
    if not isinstance(about, Mapping) or about.get("format") != FORMAT:
        raise CheckpointError(f"{file}: this file is none of mpjax's, or damaged.")
    if about.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: written in version {about.get('format_version')!r} of the format, by mpjax "
            f"{about.get('mpjax')!r}; this mpjax reads version {FORMAT_VERSION}."
        )
    for name, kind in TABLES.items():
        if not isinstance(about.get(name), kind):
            raise CheckpointError(f"{file}: its entry {name!r} is damaged.")
    for path, entry in about["leaves"].items():
        if not _is_whole(entry):
            raise CheckpointError(f"{file}: its entry of the leaf {path!r} is damaged.")


def _is_whole(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("means"), str):
        return False
    shape = entry.get("shape")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        return False
    try:
        if "key" in entry:
            return str(jax.random.key(0, impl=entry["key"]).dtype) == entry["dtype"]
        return isinstance(entry["dtype"], str) and str(jnp.dtype(entry["dtype"])) == entry["dtype"]
    except (KeyError, TypeError, ValueError):
        return False


def read_arrays(
    directory: str | Path, about: dict[str, Any], shardings: Mapping[str, Any]
) -> dict[str, Any]:
    """Reads leaves by their paths, in the dtypes they were saved in.

    Args:
        directory: The checkpoint.
        about: What was written beside its arrays.
        shardings: From path to where the leaf shall live; None for an array that is committed
            nowhere, as new arrays are.

    Returns:
        From path to array: JAX's, or NumPy's of a dtype that JAX does not hold.

    Raises:
        CheckpointError: If a file is damaged.
    """
    ocp = orbax()
    path = _path(directory)
    table = about["leaves"]
    stored = [name for name in shardings if 0 not in table[name]["shape"]]
    how = {
        name: ocp.RestoreArgs(restore_type=np.ndarray)
        if shardings[name] is None or not is_held(_plain(table[name]["dtype"]))
        else ocp.ArrayRestoreArgs(sharding=shardings[name])
        for name in stored
    }
    arrays: dict[str, Any] = {}
    if stored:
        item = dict.fromkeys(stored, 0)
        args = ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
        arrays = dict(_restore(path, ocp.args.Composite(state=args), path / "state").state)
    read = {}
    for name in shardings:
        entry = table[name]
        value = arrays[name] if name in arrays else np.zeros(entry["shape"], _plain(entry["dtype"]))
        if "key" in entry:
            value = jax.random.wrap_key_data(jnp.array(value), impl=entry["key"])
        if (list(value.shape), str(value.dtype)) != (entry["shape"], entry["dtype"]):
            raise CheckpointError(
                f"{path}: the array {name!r} is {value.dtype}{value.shape}, but should be "
                f"{entry['dtype']}{tuple(entry['shape'])}. Its files are damaged, or another's."
            )
        read[name] = held(value)
    return read


def _plain(dtype: str) -> Any:
    return np.uint32 if dtype.startswith("key<") else jnp.dtype(dtype)


def _restore(path: Any, args: Any, file: Any) -> Any:
    """Lets orbax read, and names the file where it cannot."""
    ocp = orbax()
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(path, args=args)
    except Exception as error:  # whatever damaged files make of orbax, JSON and tensorstore
        reason = str(error).strip().splitlines() or [""]
        raise CheckpointError(
            f"{file}: this cannot be read; it is damaged, incomplete or of another format. "
            f"{type(error).__name__}: {reason[0][:300]}"
        ) from error


def absolute(directory: str | Path) -> str:
    """Returns an absolute path, which orbax asks for; addresses such as gs:// are left alone."""
    text = str(directory)
    return text if "://" in text else str(Path(text).absolute())
