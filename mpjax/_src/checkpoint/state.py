"""Checkpoints of a training state: `save`, `restore`, `describe`."""

from pathlib import Path
from typing import Any, NamedTuple

from mpjax._src.checkpoint import arrays, store
from mpjax._src.checkpoint.match import converted, match, place_of
from mpjax._src.core.base.errors import check_flag
from mpjax._src.core.base.public import public
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import PolicyLike


@public("mpjax.checkpoint")
class Description(NamedTuple):
    """The description of a checkpoint, as `describe` returns it.

    Attributes:
        policy: The ``policy`` argument of `save`, as a string, or None.
        data: The ``data`` argument of `save`.
        dtypes: The name of each leaf's dtype, by the leaf's path.
        shapes: The shape of each leaf, by the leaf's path.
        mpjax: The version of mpjax that wrote the checkpoint.
        jax: The version of JAX that wrote the checkpoint.
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
    policy: "PolicyLike | None" = None,
    data: Any = None,
) -> None:
    """Saves a state into a new directory. The directory appears only when it is complete.

    orbax writes the arrays in the dtypes that they have. The checkpoint also records the path,
    shape and dtype of every leaf, which leaves are float32 masters, the classes of the optimizer's
    state, the settings of the loss scale, the versions of mpjax and JAX, ``policy`` and ``data``,
    and a checksum of each stored shard.

    If several threads or processes save to one new directory at the same time, exactly one of them
    does. (In a storage bucket, and on a file system without locks, this is not ensured.)

    Args:
        directory: The new directory. It must not exist.
        state: A `TrainState`, or any pytree of arrays. A dict of "params", "opt_state" and
            "loss_scale" from your own training loop can be restored under other policies too.
        policy: The policy that the state is trained under, or None. `describe` returns it.
        data: Any data that JSON can represent, such as the position of the data iterator.

    Raises:
        CheckpointError: If the checkpoint cannot be written, such as on a full disk. Nothing of it
            remains.
        FileExistsError: If ``directory`` exists, or someone else is writing it. A checkpoint is
            never overwritten: if the process were killed while overwriting, both the old and the
            new state would be lost.
        ImportError: If a package of the extra ``checkpoint`` is not installed.
        TypeError: If ``directory`` is not a path, or ``state`` has no leaves or a leaf that is not
            an array.
        ValueError: If nothing can be written to ``directory``, an array has been donated, or JSON
            cannot represent ``data`` exactly.

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
    about = store.described(state, policy_name(policy), data)
    store.write(directory, state, about)


def policy_name(policy: "PolicyLike | None") -> str | None:
    """Returns a policy as the string that is written, or None."""
    return None if policy is None else str(get_policy(policy))


def describe(directory: str | Path) -> Description:
    """Describes a checkpoint without reading its arrays.

    Args:
        directory: The directory of the checkpoint.

    Returns:
        A `Description`: policy, data, dtypes and shapes by path, and versions.

    Raises:
        CheckpointError: If ``directory`` is not a checkpoint of mpjax, or is damaged.
        FileNotFoundError: If ``directory`` does not exist.
        ImportError: If a package of the extra ``checkpoint`` is not installed.

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


def restore(
    directory: str | Path, like: Any, *, allow_narrowing: bool = False, verify: bool = True
) -> Any:
    """Restores a state, bit for bit under the same policy, or converted to another policy.

    Under the policy that the state was saved with, every leaf is restored bit for bit. Under
    another policy, float32 parameters become masters, whole or split, and masters become
    parameters. 16-bit parameters are rounded from the most precise saved copy. Leaves are widened
    without a warning. A conversion that loses precision is refused: masters that the new policy
    does not store, or stores with fewer bits; float32 to 16 bits; one 16-bit dtype to the other.

    The loss scale is restored if its class and settings are those of ``like``, and otherwise starts
    as in ``like``. A loss scale that never changes, such as a `StaticLossScale`, is read from
    ``like``.

    Args:
        directory: The directory of the checkpoint.
        like: A tree with the structure, shapes and dtypes to restore: ``init(params)``, or
            ``jax.eval_shape(init, params)``, whose leaves may have shardings. Arrays are put on the
            devices that the leaves of ``like`` are committed to, which may be other devices than
            before, or another number of them. A dict of some parts, such as
            ``{"params": params}``, restores only those parts.
        allow_narrowing: Whether leaves may lose precision. A conversion that would make a finite
            value infinite is refused in any case.
        verify: Whether to compare what is read with the checksums in the checkpoint. Without that,
            a damaged checkpoint may be restored with other numbers. A checkpoint of an early
            version of mpjax has no checksums.

    Returns:
        A tree of the structure and dtypes of ``like``.

    Raises:
        CheckpointError: If ``directory`` is not a checkpoint of mpjax, or is damaged. The message
            names the array, or the file.
        FileNotFoundError: If ``directory`` does not exist.
        ImportError: If a package of the extra ``checkpoint`` is not installed.
        ValueError: If the checkpoint was written by a different model or optimizer, or would lose
            precision. The message names the first leaves that differ.

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
    check_flag("verify", verify)
    about = store.read_about(directory, verify)
    sources = match(about, like, allow_narrowing, str(directory))
    places: dict[str, Any] = {}
    for source in sources:
        for path in (source.path, source.companion):
            if path is not None:
                # Leaves that come from one saved array share it, placed as the first of them.
                places.setdefault(path, place_of(source.target.value))
    found = arrays.read(store.for_orbax(directory) / "state", about, places, verify)
    return converted(sources, found, like, str(directory))
