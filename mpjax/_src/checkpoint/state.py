"""Saving a state and restoring it: `save`, `restore`, `describe`."""

from pathlib import Path
from typing import Any, NamedTuple

import jmp

from mpjax._src.checkpoint import store
from mpjax._src.checkpoint.convert import converted, place_of
from mpjax._src.checkpoint.match import match
from mpjax._src.policy import get_policy


class Description(NamedTuple):
    """What a checkpoint says of itself.

    Attributes:
        policy: The policy that it was saved with, as a string; None if none was told.
        data: What was saved beside the state.
        dtypes: From the path of each leaf to its dtype.
        shapes: From the path of each leaf to its shape.
        mpjax: The version of mpjax that wrote it.
        jax: The version of JAX that wrote it.
    """

    policy: str | None
    data: Any
    dtypes: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    mpjax: str
    jax: str


def save(
    directory: str | Path,
    state: Any,
    *,
    policy: str | jmp.Policy | None = None,
    data: Any = None,
) -> None:
    """Saves a state into a new directory: whole, or not at all.

    The arrays are written by orbax, in the dtypes they have. Beside them lie every leaf's path,
    shape and dtype, which leaves are float32 masters, the classes of the optimizer's state, the
    settings of the loss scale, the versions of mpjax and JAX, the policy and ``data``.

    Args:
        directory: Where to; it must not exist yet.
        state: A `TrainState`, or any pytree of arrays: a dict of "params", "opt_state" and
            "loss_scale" from a loop of your own is restored under other policies too.
        policy: The policy that the state is trained under, for whoever asks `describe`.
        data: Anything that JSON can hold, such as the position of the data iterator.

    Raises:
        FileExistsError: If ``directory`` exists. A checkpoint is never overwritten, because a
            process that is killed in between would leave neither.
        ImportError: If orbax-checkpoint is not installed.
        TypeError: If a leaf of ``state`` is no array.
        ValueError: If ``data`` does not come back from JSON as it was.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax, optax, tempfile
        >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
        >>> init, step = mpjax.build_train_step(loss_fn, optax.adam(1e-3), "O2:bfloat16")
        >>> state = init({"w": jnp.ones(3)})
        >>> directory = tempfile.mkdtemp() + "/first"
        >>> mpjax.checkpoint.save(directory, state, policy="O2:bfloat16", data={"batch": 7})
        >>> mpjax.checkpoint.describe(directory).data
        {'batch': 7}
    """
    if store.exists(directory):
        raise FileExistsError(
            f"directory={str(directory)!r} exists. A checkpoint is never overwritten: choose "
            "another name, or let a Manager number them and remove old ones."
        )
    store.write(directory, store.saved_form(state, policy_name(policy), data))


def policy_name(policy: str | jmp.Policy | None) -> str | None:
    """Returns the string that is written for a policy."""
    return None if policy is None else str(get_policy(policy))


def describe(directory: str | Path) -> Description:
    """Tells what a checkpoint holds, without reading its arrays.

    Args:
        directory: The checkpoint.

    Returns:
        A `Description`: policy, data, dtypes and shapes by path, versions.

    Raises:
        CheckpointError: If it is no checkpoint of mpjax's, or a damaged one.
        FileNotFoundError: If there is no such directory.
        ImportError: If orbax-checkpoint is not installed.

    Example:
        >>> import jax.numpy as jnp, mpjax, tempfile
        >>> directory = tempfile.mkdtemp() + "/params"
        >>> mpjax.checkpoint.save(directory, {"params": {"w": jnp.ones(3, jnp.bfloat16)}})
        >>> mpjax.checkpoint.describe(directory).dtypes
        {'params/w': 'bfloat16'}
    """
    about = store.read_about(directory)
    leaves = about["leaves"]
    return Description(
        policy=about.get("policy"),
        data=about.get("data"),
        dtypes={path: entry["dtype"] for path, entry in leaves.items()},
        shapes={path: tuple(entry["shape"]) for path, entry in leaves.items()},
        mpjax=about.get("mpjax", ""),
        jax=about.get("jax", ""),
    )


def restore(directory: str | Path, like: Any, *, allow_narrowing: bool = False) -> Any:
    """Restores a state: bit for bit, or in the dtypes of another policy, or not at all.

    Under the policy it was saved with, every leaf comes back as it was. Under another one float32
    parameters become masters, whole or split, and masters parameters; half parameters are rounded
    from the most precise copy there is. Widening is silent. What would lose precision is refused:
    masters that the new policy does not keep, or not whole, float32 that becomes half, one half
    that becomes the other.

    The loss scale goes on from where it was if it has the same class and settings; else it starts
    as in ``like``. So does one that never changes, such as a `StaticLossScale`: it is a setting.

    Args:
        directory: The checkpoint.
        like: What to restore: ``init(params)``, or ``jax.eval_shape(init, params)``, whose leaves
            may carry shardings. Structure, shapes and dtypes must be those that the program wants;
            arrays are put where those of ``like`` are committed, on any number of devices. A dict
            of some parts, such as ``{"params": params}``, restores those alone.
        allow_narrowing: Whether leaves may lose precision. A finite value that would become
            infinite is refused all the same.

    Returns:
        A tree of the structure and dtypes of ``like``.

    Raises:
        CheckpointError: If it is no checkpoint of mpjax's, or a damaged one, naming the file.
        FileNotFoundError: If there is no such directory.
        ImportError: If orbax-checkpoint is not installed.
        ValueError: If the checkpoint is that of another model or optimizer, or would lose
            precision, naming the first leaves that differ.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax, optax, tempfile
        >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
        >>> init, _ = mpjax.build_train_step(loss_fn, optax.adam(1e-3), "float32")
        >>> params = {"w": jnp.full(3, 0.1)}
        >>> directory = tempfile.mkdtemp() + "/float32"
        >>> mpjax.checkpoint.save(directory, init(params))
        >>> init, _ = mpjax.build_train_step(loss_fn, optax.adam(1e-3), "O2:bfloat16")
        >>> state = mpjax.checkpoint.restore(directory, like=init(params))
        >>> str(state.params["w"].dtype), float(state.opt_state.masters["w"][0])
        ('bfloat16', 0.10000000149011612)
    """
    about = store.read_about(directory)
    sources = match(about, like, allow_narrowing, str(directory))
    places: dict[str, Any] = {}
    for source in sources:
        for path in filter(None, (source.path, source.beside)):
            places.setdefault(path, place_of(source.target.value))
    arrays = store.read_arrays(directory, about, places)
    return converted(sources, arrays, like, str(directory))
