"""Weights for inference, and files of them that other frameworks read."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mpjax._src.checkpoint.contents import FORMAT, PARAMS, part_of
from mpjax._src.checkpoint.convert import converted, held, overflows
from mpjax._src.checkpoint.match import NAMED, differences, match
from mpjax._src.dtypes import BFLOAT16, DTypeLike, canonical
from mpjax._src.errors import CheckpointError
from mpjax._src.patterns import path_of
from mpjax._src.training.masters import master_params
from mpjax._src.trees import cast_leaf, is_array


def export_params(state: Any, dtype: DTypeLike = "float32") -> Any:
    """Returns the parameters for inference: from float32 masters where there are any.

    Args:
        state: A `TrainState`, or a dict of "params" and "opt_state".
        dtype: What floating parameters become; float64 ones stay. Half ones are rounded once, from
            the masters.

    Returns:
        The tree of parameters. What else inference needs, such as BatchNorm's statistics, is in
        ``state.model_state``.

    Raises:
        TypeError: If ``state`` has no parameters.
        ValueError: If a finite weight would become infinite, naming the leaves.

    Example:
        >>> import jax.numpy as jnp, mpjax, optax
        >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
        >>> init, _ = mpjax.build_train_step(loss_fn, optax.adam(1e-3), "O2:bfloat16")
        >>> params = mpjax.export_params(init({"w": jnp.ones(3)}), "float16")
        >>> str(params["w"].dtype)
        'float16'
    """
    to = canonical(dtype, "dtype")
    params = part_of(state, PARAMS)
    if params is None:
        raise TypeError(
            f"state is a {type(state).__name__} without params. Pass the TrainState, or "
            "{'params': params, 'opt_state': opt_state}."
        )
    full = master_params(part_of(state, "opt_state"), params)
    half = jax.tree.map(lambda leaf: cast_leaf(leaf, to), full)
    lost = [
        path_of(keys)
        for (keys, wide), narrow in zip(
            jax.tree_util.tree_leaves_with_path(full), jax.tree.leaves(half), strict=True
        )
        if is_array(wide) and wide.dtype != narrow.dtype and overflows(wide, narrow)
    ]
    if lost:
        raise ValueError(
            f"dtype={to.name!r}: finite weights would become infinite in {lost[:NAMED]}"
            + (f" and {len(lost) - NAMED} more" if len(lost) > NAMED else "")
            + ". Export in 'bfloat16', which has the range of float32, or in 'float32'."
        )
    return half


def save_safetensors(file: str | Path, params: Any, metadata: dict[str, str] | None = None) -> None:
    """Writes parameters to a safetensors file, which PyTorch and others read.

    Names are paths joined with ".": "Dense_0.kernel". The file appears when it is whole, in the
    place of one that was there.

    Args:
        file: The name of the file.
        params: A tree of arrays, such as `export_params` returns.
        metadata: Strings by name, for the header of the file.

    Raises:
        ImportError: If safetensors is not installed.
        ValueError: If two leaves have one name, or a leaf has a dtype that others do not read.

    Example:
        >>> import jax.numpy as jnp, mpjax, tempfile
        >>> file = tempfile.mkdtemp() + "/params.safetensors"
        >>> mpjax.save_safetensors(file, {"Dense_0": {"kernel": jnp.ones(3)}})
        >>> sorted(mpjax.load_safetensors(file))
        ['Dense_0.kernel']
    """
    safetensors = _safetensors()
    arrays = {}
    for name, leaf in _named(params):
        # In C order: safetensors writes the memory of an array, whatever its strides.
        arrays[name] = np.array(leaf, order="C")
        dtype = arrays[name].dtype
        if dtype != BFLOAT16 and dtype.isbuiltin != 1:
            raise ValueError(
                f"params: {name!r} is {dtype}, which not every reader of safetensors knows. "
                "export_params(state, 'float16') or another dtype of policies is safe."
            )
    temporary = f"{file}.tmp"
    try:
        safetensors.numpy.save_file(arrays, temporary, {"format": "flax", **(metadata or {})})
        os.replace(temporary, file)
    finally:
        Path(temporary).unlink(missing_ok=True)


def load_safetensors(file: str | Path, like: Any = None, *, allow_narrowing: bool = False) -> Any:
    """Reads the parameters of a safetensors file.

    Args:
        file: The name of the file.
        like: The tree of parameters that is wanted, or of their shapes; names must be those of
            `save_safetensors`. If None, arrays by name are returned.
        allow_narrowing: Whether leaves may be narrowed to the dtypes of ``like``.

    Returns:
        A tree of the structure and dtypes of ``like``; without it, a dict from name to array.

    Raises:
        CheckpointError: If the file is damaged or of another format.
        FileNotFoundError: If there is no such file.
        ImportError: If safetensors is not installed.
        ValueError: If the file does not fit ``like``: in names, shapes or dtypes.

    Example:
        >>> import jax.numpy as jnp, mpjax, tempfile
        >>> file, params = tempfile.mkdtemp() + "/w", {"w": jnp.ones(3, jnp.bfloat16)}
        >>> mpjax.save_safetensors(file, params)
        >>> str(mpjax.load_safetensors(file, like={"w": jnp.zeros(3)})["w"].dtype)
        'float32'
    """
    safetensors = _safetensors()
    if not Path(file).is_file():
        raise FileNotFoundError(f"file={str(file)!r}: there is no such file.")
    try:
        read = safetensors.numpy.load_file(file)
    except Exception as error:  # its own class, and what its header makes of NumPy
        raise CheckpointError(
            f"{file}: this is no whole safetensors file. {type(error).__name__}: {error}"
        ) from error
    if like is None:
        return {name: held(value) for name, value in read.items()}
    paths = {name: path for (name, _), path in zip(_named(like), _paths(like), strict=True)}
    if paths.keys() != read.keys():
        missing = (name for name in paths if name not in read)
        extra = (name for name in read if name not in paths)
        raise ValueError(
            f"like: the file {file} holds other parameters. {differences(missing, extra)}Names are "
            "paths joined with '.'; without like, arrays by name are returned."
        )
    about = {
        "format": FORMAT,
        "leaves": {
            paths[name]: {
                "means": paths[name],
                "dtype": str(value.dtype),
                "shape": list(value.shape),
            }
            for name, value in read.items()
        },
        "kinds": {},
        "loss_scale": None,
    }
    wanted = {PARAMS: like}
    sources = match(about, wanted, allow_narrowing, str(file))
    arrays = {paths[name]: held(value) for name, value in read.items()}
    return converted(sources, arrays, wanted, str(file))[PARAMS]


def _named(params: Any) -> list[tuple[str, Any]]:
    named = [
        (jax.tree_util.keystr(keys, simple=True, separator="."), leaf)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]
    for name, count in Counter(name for name, _ in named).items():
        if count > 1:
            raise ValueError(
                f"params: two leaves are named {name!r} in the file. A key that contains '.' is "
                "the usual cause."
            )
    return named


def _paths(params: Any) -> list[str]:
    nodes = jax.tree_util.tree_leaves_with_path({PARAMS: params})
    return [path_of(keys) for keys, _ in nodes]


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "save_safetensors and load_safetensors need the package safetensors, which is not "
            "installed: pip install 'mpjax[safetensors]'."
        ) from error
    return safetensors
