"""Files of a checkpoint, written and read by orbax. Only this module imports orbax.

A checkpoint is a directory of two items: ``state``, a flat dict from path to array, and ``about``,
a JSON file. It contains no code, and nothing in it is executed.
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
    shaped,
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
            "mpjax.checkpoint needs the package orbax-checkpoint, which is not installed: "
            "pip install 'mpjax[checkpoint]'."
        ) from error
    return orbax.checkpoint


def saved_form(state: Any, policy: str | None, data: Any) -> Any:
    """Returns the arguments for orbax: the arrays by path, and their description."""
    ocp = orbax()
    about = describe(state, policy, _checked(data))
    # orbax cannot write empty arrays, nor an item without arrays; the shape of an empty array in
    # the description is enough. Keys are written as their data.
    arrays = {
        leaf.path: jax.random.key_data(leaf.value) if is_key(leaf.value) else _array(leaf.value)
        for leaf in leaves_of(state)
        if np.size(leaf.value)
    }
    args = ocp.args
    state_item = {"state": args.PyTreeSave(arrays)} if arrays else {}
    return args.Composite(about=args.JsonSave(about), **state_item)


def _array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else np.asarray(value, shaped(value)[1])


def _checked(data: Any) -> Any:
    """Returns ``data`` if JSON can represent it exactly."""
    try:
        same = json.loads(json.dumps(data, allow_nan=False)) == data
    except (TypeError, ValueError) as error:
        raise ValueError(f"data={data!r} cannot be written as JSON: {error}.") from None
    if not same:
        raise ValueError(
            f"data={data!r} is changed by a round trip through JSON. Legal are dicts with string "
            "keys, lists (no tuples), strings, finite numbers, True, False and None."
        )
    return data


def _path(directory: str | Path) -> Any:
    from etils import epath  # used by orbax; it reads storage buckets too

    return epath.Path(absolute(directory))


def exists(directory: str | Path) -> bool:
    """Returns whether a file or directory of this name exists."""
    orbax()
    return _path(directory).exists()


def write(directory: str | Path, args: Any) -> None:
    """Writes a checkpoint, which appears under its name only when it is complete."""
    ocp = orbax()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(absolute(directory), args=args)


def read_about(directory: str | Path) -> dict[str, Any]:
    """Reads and checks the description of a checkpoint.

    Raises:
        FileNotFoundError: If the directory does not exist.
        CheckpointError: If it is not a checkpoint of mpjax, or is damaged.
    """
    ocp = orbax()
    path = _path(directory)
    if not path.is_dir():
        raise FileNotFoundError(f"directory={str(directory)!r} does not exist.")
    steps = [p.name for p in path.iterdir() if p.name.isdigit()]
    if steps and not (path / "about").exists():
        raise CheckpointError(
            f"directory={str(directory)!r} is the directory of a Manager, with the checkpoints "
            f"{', '.join(sorted(steps, key=int)[:10])}. Pass one of them, such as "
            f"{str(path / max(steps, key=int))!r}."
        )
    if not (path / "about").exists():
        raise CheckpointError(
            f"directory={str(directory)!r} is not a checkpoint of mpjax, or its file "
            "about/metadata is missing. It contains "
            f"{sorted(p.name for p in path.iterdir())[:10]}."
        )
    args = ocp.args.Composite(about=ocp.args.JsonRestore())
    about = _restore(path, args, path / "about" / "metadata").about
    _check_about(about, path / "about" / "metadata")
    return about


def _check_about(about: Any, file: Any) -> None:
    if not isinstance(about, Mapping) or about.get("format") != FORMAT:
        raise CheckpointError(f"{file}: this file was not written by mpjax, or is damaged.")
    if about.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: the checkpoint has version {about.get('format_version')!r} of the format, "
            f"written by mpjax {about.get('mpjax')!r}, but this mpjax reads version "
            f"{FORMAT_VERSION}."
        )
    for name, kind in TABLES.items():
        if not isinstance(about.get(name), kind):
            raise CheckpointError(f"{file}: its entry {name!r} is damaged.")
    for path, entry in about["leaves"].items():
        if not _is_whole(entry):
            raise CheckpointError(f"{file}: its entry for the leaf {path!r} is damaged.")


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
        directory: The directory of the checkpoint.
        about: The description of the checkpoint.
        shardings: The sharding of each leaf, by path; None for an array that is not committed to a
            device.

    Returns:
        The arrays by path: of JAX, or of NumPy if JAX does not support the dtype.

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
                f"{entry['dtype']}{tuple(entry['shape'])}. Its files are damaged, or belong to "
                "another checkpoint."
            )
        read[name] = held(value)
    return read


def _plain(dtype: str) -> Any:
    return np.uint32 if dtype.startswith("key<") else jnp.dtype(dtype)


def _restore(path: Any, args: Any, file: Any) -> Any:
    """Reads with orbax, and names the file in the error if that fails."""
    ocp = orbax()
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(path, args=args)
    except Exception as error:  # orbax, JSON and tensorstore raise many classes on damaged files
        reason = str(error).strip().splitlines() or [""]
        raise CheckpointError(
            f"{file} cannot be read: it is damaged, incomplete or has another format. "
            f"{type(error).__name__}: {reason[0][:300]}"
        ) from error


def absolute(directory: str | Path) -> str:
    """Returns an absolute path, which orbax needs; addresses such as gs:// are not changed."""
    text = str(directory)
    return text if "://" in text else str(Path(text).absolute())
