"""Files of a checkpoint, written by orbax. Only this module imports orbax.

A checkpoint is a directory of two items: ``state``, a flat dict from path to array, and ``about``,
a JSON file. It contains no code, and nothing in it is executed.
"""

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mpjax._src.checkpoint import arrays, checksums, fields
from mpjax._src.checkpoint.contents import Leaf, describe, leaves_of, no_values, shaped
from mpjax._src.checkpoint.locks import lock, shared_text
from mpjax._src.checkpoint.packages import all_needed, needed
from mpjax._src.checkpoint.paths import UNFINISHED, absolute, for_orbax, is_remote, worded
from mpjax._src.core.base.errors import CheckpointError, brief
from mpjax._src.core.base.trees import is_key


def orbax() -> Any:
    """Imports orbax.checkpoint, which takes a second and is not always installed."""
    return needed("orbax.checkpoint")


def handlers() -> Any:
    """Returns orbax's handlers of the two items, which end in this order.

    The last one reads back what was written, before the checkpoint gets its name: what orbax could
    not write, it may only log (test_a_background_save_that_stores_nothing_is_refused).
    """
    ocp = orbax()

    class About(ocp.JsonCheckpointHandler):  # type: ignore[name-defined]
        def finalize(self, directory: Any) -> None:
            super().finalize(directory)
            try:
                about = fields.read(directory / "metadata")
                arrays.check_stored(directory.parent / "state", about["leaves"])
            except CheckpointError as error:
                raise CheckpointError(
                    f"The checkpoint is not kept, because what was written cannot be found: {error}"
                ) from None

    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("state", ocp.args.PyTreeSave)
    registry.add("about", ocp.args.JsonSave, About())
    return registry


def described(state: Any, policy: str | None, data: Any) -> dict[str, Any]:
    """Returns the description of a state that can be saved, without checksums.

    Raises:
        TypeError: If the state has no leaves, or one that is not an array.
        ValueError: If a leaf has no values, or JSON cannot represent ``data`` exactly.
    """
    all_needed()
    if not jax.tree.leaves(state):
        raise TypeError(
            f"state={brief(state)} contains no arrays, so nothing could be restored from its "
            "checkpoint. Pass the state that the train step returns, or a dict of its parts, such "
            "as {'params': params}."
        )
    for leaf in leaves_of(state):
        _check_storable(f"state[{leaf.path!r}]", leaf)
    return describe(state, policy, _checked(data))


def _check_storable(name: str, leaf: Leaf) -> None:
    value = leaf.value
    if lacks := no_values(value):
        raise ValueError(f"{name} {lacks}")
    try:
        # Half of a surrogate pair in a key cannot be part of the name of a file.
        leaf.path.encode()
        if not is_key(value):
            needed("tensorstore").dtype(shaped(value)[1])
    except UnicodeEncodeError:
        raise ValueError(f"{name} has a key that is not valid Unicode. Rename it.") from None
    except ValueError:
        raise ValueError(
            f"{name} is {shaped(value)[1]}, which checkpoints do not support. Cast it to a dtype "
            "that represents its values, such as uint8 for uint4."
        ) from None


def saved_form(state: Any, about: dict[str, Any]) -> Any:
    """Returns the arguments for orbax: the arrays by path, and their description."""
    # orbax cannot write empty arrays, nor an item without arrays; the shape of an empty array in
    # the description is enough.
    stored = {x.path: _stored(x.value) for x in leaves_of(state) if np.size(x.value)}
    about[checksums.ARRAYS] = checksums.of_arrays(stored)
    # Last, because it covers all other fields.
    about[checksums.ABOUT] = checksums.of_about(about)
    args = orbax().args
    state_item = {"state": args.PyTreeSave(stored)} if stored else {}
    return args.Composite(about=args.JsonSave(about), **state_item)


def _stored(value: Any) -> Any:
    """Returns the array that is written of a leaf; of random keys, their data."""
    if is_key(value):
        return jax.random.key_data(value)
    return value if isinstance(value, jax.Array) else np.asarray(value, shaped(value)[1])


def _checked(data: Any) -> Any:
    """Returns ``data`` if JSON can represent it exactly."""
    try:
        same = json.loads(json.dumps(data, allow_nan=False)) == data
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"data={brief(data)} cannot be written as JSON: {error}.") from None
    if not same:
        raise ValueError(
            f"data={brief(data)} is changed by a round trip through JSON. Use a dict with string "
            "keys, lists (no tuples), strings, finite numbers, True, False and None."
        )
    return data


def write(directory: str | Path, state: Any, about: dict[str, Any]) -> None:
    """Writes a new checkpoint, which appears under its name only when it is complete.

    Raises:
        CheckpointError: If it cannot be written, such as on a full disk.
        FileExistsError: If it exists, or is being written by another process or thread.
    """
    with contextlib.ExitStack() as stack:
        holder = claim(directory, f".{Path(absolute(directory)).name}.lock", stack)
        # All processes have to decide alike, and a file system may answer each of them differently.
        exists = shared_text("yes" if for_orbax(directory).exists() else None)
        if exists or holder:
            what = f"is being written by {holder}" if holder else "exists"
            raise FileExistsError(
                f"directory={str(directory)!r} {what}, and a checkpoint is never overwritten. "
                "Choose another name, or use a Manager, which numbers checkpoints and removes old "
                "ones."
            )
        args = saved_form(state, about)
        handler = orbax().CompositeCheckpointHandler(handler_registry=handlers())
        # orbax logs what it raises, with its traceback.
        with quiet(), writing(directory), orbax().Checkpointer(handler) as checkpointer:
            checkpointer.save(for_orbax(directory), args=args)


def claim(
    directory: str | Path, name: str, until: contextlib.ExitStack, inside: bool = False
) -> str | None:
    """Locks a directory by a file next to or inside it; see `locks.lock`. Buckets have no locks."""
    path = absolute(directory)
    all_needed()  # before anything is made
    if is_remote(path):
        return None
    folder = Path(path) if inside else Path(path).parent
    with worded(f"directory={path!r}: it cannot be locked: ", ".", cause=False):
        folder.mkdir(parents=True, exist_ok=True)
        return lock(str(folder / name), until)


@contextlib.contextmanager
def writing(directory: str | Path, inside: bool = False) -> Iterator[None]:
    """Words the errors of writing a checkpoint, and removes what was half written.

    orbax leaves it there (test_background_save_to_a_full_disk_is_one_short_error).

    The directory, which is locked, is that of the checkpoint, or of the one with it ``inside``.

    Raises:
        CheckpointError: If anything was raised.
    """
    path = absolute(directory)
    before = f"directory={path!r}: the checkpoint could not be written: "
    after = ". Nothing of it remains, and earlier checkpoints are intact."
    try:
        with worded(before, after, cause=False):
            yield
    except CheckpointError:
        if jax.process_index() == 0 and not is_remote(path):
            rests = Path(path).glob(f"*{UNFINISHED}") if inside else [Path(path + UNFINISHED)]
            for rest in rests:
                shutil.rmtree(rest, ignore_errors=True)
        raise


@contextlib.contextmanager
def quiet(least: int = logging.NOTSET) -> Iterator[None]:
    """Keeps orbax from logging errors that are raised too, and what is below a level.

    It logs each several times (test_background_save_to_a_full_disk_is_one_short_error).
    """
    logger = logging.getLogger("absl")

    def is_shown(record: logging.LogRecord) -> bool:
        is_ours = "orbax" in record.pathname
        return not (is_ours and (record.exc_info or record.levelno < least))

    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)


def read_about(directory: str | Path, verify: bool = True) -> dict[str, Any]:
    """Reads and checks the description of a checkpoint.

    Raises:
        FileNotFoundError: If the directory does not exist.
        CheckpointError: If it is not a checkpoint of mpjax, or is damaged.
    """
    path = for_orbax(directory)
    if not path.is_dir():
        raise FileNotFoundError(f"directory={str(directory)!r} does not exist.")
    if (path / "about").exists():
        return fields.read(path / "about" / "metadata", verify)
    names = sorted(p.name for p in path.iterdir())
    wrong = (
        "is not a checkpoint of mpjax, or its file about/metadata is missing. It contains "
        f"{names[:10]}."
    )
    if steps := sorted(filter(str.isdecimal, names), key=int):
        wrong = (
            f"is the directory of a Manager, with the checkpoints {', '.join(steps[:10])}. Pass "
            f"one of them, such as {str(path / steps[-1])!r}."
        )
    raise CheckpointError(f"directory={str(directory)!r} {wrong}")


def numbers() -> Any:
    """Returns orbax's format of numbers, by which it finds those that mpjax has written alone.

    Otherwise a folder of the user's that has a number for a name would be the last checkpoint, and
    be removed in its turn (test_manager_leaves_alone_what_has_a_number_but_is_no_checkpoint).
    """
    standard: Any = type(orbax().path.step.standard_name_format())

    class Written(standard):
        def find_all(self, base_path: Any) -> Iterator[Any]:
            found = super().find_all(base_path)
            return (step for step in found if (step.path / "about" / "metadata").exists())

    return Written()


def foreign(directory: str | Path) -> list[str]:
    """Returns what has a number for a name in the directory of a Manager, but is no checkpoint."""
    return [p.name for p in _numbered(directory) if not (p / "about" / "metadata").exists()]


def _numbered(directory: str | Path) -> list[Any]:
    path = for_orbax(directory)
    return [p for p in path.iterdir() if p.name.isdecimal()] if path.is_dir() else []


def check_metrics(directory: str | Path) -> None:
    """Compares the metrics of a Manager's checkpoints, in files of orbax, with the descriptions.

    orbax has no checksums of them (test_manager_refuses_damaged_metrics).

    Raises:
        CheckpointError: If a file is damaged.
    """
    for step in _numbered(directory):
        file = step / "metrics" / "metrics"
        try:
            expected, data = read_about(step).get("metrics"), file.read_bytes()
        except (OSError, CheckpointError):
            continue  # it has none, is being removed, or is damaged elsewhere: a restore will tell
        try:
            metrics = json.loads(data)
        except ValueError:
            metrics = None
        if expected is not None and repr(metrics) != repr(expected):  # NaN is not equal to itself
            raise CheckpointError(
                f"{file} is damaged: it should contain {json.dumps(expected)}. Repair it, or "
                f"remove the checkpoint {step.name}."
            )
