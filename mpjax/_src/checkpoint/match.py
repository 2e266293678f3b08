"""A restore: which saved leaf becomes which leaf of the state, in its dtype; what is refused.

The plan is computed from the checkpoint's description, before any array is read.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.checkpoint.contents import (
    LOSS_SCALE,
    MASTER,
    RESIDUAL,
    Leaf,
    is_companion,
    is_draws,
    is_held,
    kinds_of,
    leaves_of,
    never_changes,
    owner_of,
    part_of,
    scales_of,
    settings_of,
    shaped,
)
from mpjax._src.core.base.dtypes import FLOAT32, limits_of
from mpjax._src.core.base.errors import check_flag, first_of
from mpjax._src.core.training import residuals
from mpjax._src.optim import codes


class Source(NamedTuple):
    """The source of a leaf of the restored state."""

    target: Leaf  # of ``like``
    path: str | None  # of the saved leaf, or None if the leaf is read from ``like``
    companion: str | None = None  # the path of the saved leaf's residual or scales
    # The dtypes of the leaf and of its residual or scales in ``like``, if it has them there.
    kind: tuple[str, str] | None = None


def match(about: dict[str, Any], like: Any, allow_narrowing: bool, where: str) -> list[Source]:
    """Returns the source of every leaf of ``like``, in the order of its leaves.

    A leaf that was saved with the same path, meaning and dtype is restored bit for bit. Any other
    leaf comes from the most precise saved copy: the master of a parameter, if it has one.
    ``like`` may be a dict of some parts of the state. ``where`` is the checkpoint, for messages.

    Raises:
        ValueError: If the checkpoint was written by a different model or optimizer, or precision
            would be lost.
    """
    saved: dict[str, dict[str, Any]] = about["leaves"]
    by_meaning = {entry["means"]: path for path, entry in saved.items()}
    check_flag("allow_narrowing", allow_narrowing)
    targets = leaves_of(like, "like")
    fresh = _starts_fresh(about, like)
    keys = map(str, like) if isinstance(like, Mapping) else (path.split("/")[0] for path in saved)
    parts = {*keys}
    dtypes = {t.means: shaped(t.value)[1] for t in targets}

    def source(target: Leaf) -> Source:
        if _is_in(target.path, fresh):
            return Source(target, None)
        of = owner_of(target.means)
        residual, now = by_meaning.get(RESIDUAL + of), dtypes.get(RESIDUAL + of)
        was = saved[residual]["dtype"] if residual is not None else None
        # If the parameter is not restored: a floating residual has the parameter's dtype.
        half = "bfloat16" if str(now).startswith("uint") else str(now)
        kind = (dtypes.get(of, half), now) if now else None
        same = saved.get(target.path)
        if same and (same["means"], same["dtype"]) == (target.means, shaped(target.value)[1]):
            # With another kind of residual, the parameter may be rounded differently.
            rounded_anew = now != was and (now or MASTER + of in dtypes)
            if is_companion(target.means) or not rounded_anew:
                return Source(target, target.path)
        master = by_meaning.get(MASTER + of)
        own = by_meaning.get(of)
        if residual is None and own is not None and is_companion(target.means):
            # Codes without their scales mean nothing.
            own = None if jnp.issubdtype(saved[own]["dtype"], jnp.integer) else own
        if master is not None or own is None:
            return Source(target, master, None, kind)
        return Source(target, own, residual, kind)

    sources = [source(target) for target in targets]
    # Counts of draws may start at 0 again: they only have to differ from step to step.
    begin = [s for s in sources if s.path is None and is_draws(s.target.means)]
    kept = [s for s in sources if not _is_in(s.target.path, fresh) and s not in begin]
    _check_same_leaves(saved, kept, parts, fresh, where)
    _check_kinds(about["kinds"], kinds_of(like), where)
    pairs = [(s, saved[s.path]) for s in kept if s.path is not None]
    _check_shapes_and_kinds(pairs, where)
    if not allow_narrowing:
        _check_precision(saved, kept, where)
    _check_width(kept)
    return sources


def _starts_fresh(about: dict[str, Any], like: Any) -> set[str]:
    """Returns the paths of loss scales that are read from ``like``, not from the checkpoint.

    A loss scale is if its class or settings differ, or if it never changes: then it is a setting.
    """
    scales = scales_of(like)
    saved = about.get("loss_scales")
    if saved is None:  # an early version, which described the loss scale of the state alone
        saved = {LOSS_SCALE: about["loss_scale"]}
        scales = {LOSS_SCALE: part_of(like, LOSS_SCALE)}

    def is_fresh(path: str) -> bool:
        if path not in scales or settings_of(scales[path]) != saved.get(path):
            return True
        # Shapes cannot be adjusted, so it is not known whether the scale changes.
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(scales[path])):
            return False
        return never_changes(scales[path])

    return set(filter(is_fresh, {*saved, *scales}))


def _is_in(path: str, parts: set[str]) -> bool:
    """Returns whether a path is one of some paths, or below it."""
    return any(f"{path}/".startswith(f"{part}/") for part in parts)


def _check_same_leaves(
    saved: dict[str, Any], sources: list[Source], parts: set[str], fresh: set[str], where: str
) -> None:
    missing = [s.target.path for s in sources if s.path is None]
    wanted = {owner_of(s.target.means) for s in sources}
    # A saved master whose parameter is restored is not left over: the parameter comes from it, or
    # _check_precision refuses to drop it.
    extra = [
        path
        for path, entry in saved.items()
        if path.split("/")[0] in parts
        and owner_of(entry["means"]) not in wanted
        and not is_draws(entry["means"])
        and not _is_in(path, fresh)
    ]
    if missing or extra:
        raise ValueError(
            f"like: the checkpoint {where} was written by a different model or optimizer. "
            f"{differences(missing, extra)}Restore it with the model and the optimizer that it was "
            "saved with. To restore only the parameters, pass like={'params': params}."
        )


def _refuse(wrong: Sequence[str], before: str, after: str, apart: str = "; ") -> None:
    if wrong:
        raise ValueError(f"like: {before} {first_of(wrong, apart=apart)}. {after}".rstrip())


def _check_kinds(saved: dict[str, str], like: dict[str, str], where: str) -> None:
    other = [
        f"{path} is a {saved[path]} in the checkpoint, but a {kind} in like"
        for path, kind in like.items()
        if path in saved and saved[path] != kind
    ]
    _refuse(
        other,
        f"the checkpoint {where} was written by a different optimizer:",
        "The leaves have the same names and shapes, but another meaning. Restore it with the "
        "optimizer that it was saved with.",
    )


def _check_shapes_and_kinds(pairs: list[tuple[Source, dict[str, Any]]], where: str) -> None:
    shapes, kinds = [], []
    for (target, _, companion, kind), was in pairs:
        (shape, dtype), before = shaped(target.value), tuple(was["shape"])
        # Scales are checked with their codes.
        if before != shape and not (kind and is_companion(target.means)):
            shapes.append(
                f"{target.path} has shape {before} in the checkpoint, but {shape} in like"
            )
        if not (kind or companion or _one_kind(was["dtype"], dtype)):
            kinds.append(f"{target.path} is {was['dtype']} in the checkpoint, but {dtype} in like")
    _refuse(shapes, f"the checkpoint {where} was written by a different model:", "")
    _refuse(
        kinds,
        f"leaves of the checkpoint {where} are of another kind:",
        "A leaf is only cast within its kind: floating to floating, integer to integer, complex to "
        "complex; a key must have the same implementation.",
    )


def _check_precision(saved: dict[str, Any], sources: list[Source], where: str) -> None:
    wanted = {s.target.means: shaped(s.target.value)[1] for s in sources}
    best = {entry["means"]: entry["dtype"] for entry in saved.values()}

    def of(dtypes: dict[str, str], means: str) -> tuple[str, str | None]:
        return dtypes.get(MASTER + means) or dtypes[means], dtypes.get(RESIDUAL + means)

    lost = []
    for s in sources:
        if is_companion(s.target.means):
            continue  # checked together with its parameter
        was, now = of(best, s.target.means), of(wanted, s.target.means)
        if not can_hold(now[0], was[0], now[1], was[1]):
            lost.append(f"{s.target.path} from {_spelled(*was)} to {_spelled(*now)}")
    _refuse(
        lost,
        f"restoring the checkpoint {where} would narrow",
        "The lost bits cannot be recovered: without their float32 masters, weights stay rounded. "
        "If you want that, pass allow_narrowing=True. If not, restore under a policy that stores "
        "float32 parameters or masters.",
        ", ",
    )


def _check_width(sources: list[Source]) -> None:
    """Refuses 64-bit leaves if JAX would narrow them."""
    for target, *_ in sources:
        dtype = shaped(target.value)[1]
        if "key<" not in dtype and not is_held(dtype):
            raise ValueError(
                f"like: {target.path} is {dtype}, which JAX supports only after "
                "jax.config.update('jax_enable_x64', True)."
            )


def can_hold(wide: str, narrow: str, *companions: str | None) -> bool:
    """Returns whether ``wide`` can represent every value of ``narrow``, a dtype of its kind.

    ``companions`` are the dtypes of residuals or scales that belong to the two, or None.
    """
    if wide == narrow and len({*companions}) < 2:
        return True
    a, b = np.dtype(wide), np.dtype(narrow)
    if jnp.issubdtype(a, jnp.integer) and not any(companions):
        ranges = jnp.iinfo(a), jnp.iinfo(b)
        return ranges[0].min <= ranges[1].min and ranges[0].max >= ranges[1].max
    pairs = zip(_reach(wide, *companions[:1]), _reach(narrow, *companions[1:]), strict=True)
    return all(x >= y for x, y in pairs)


def _reach(dtype: str, residual: str | None = None) -> tuple[int, int, int]:
    """Returns the bits of the significand, the largest exponent, and the reach below 1 in bits."""
    if residual and jnp.issubdtype(dtype, jnp.integer):
        return 1, 0, 0  # codes: less than any float
    limits = limits_of(np.dtype(dtype))
    bits = residuals.KINDS[np.dtype(residual)].bits if residual else limits.digits
    return bits, limits.overflow, bits - limits.normal


def _spelled(dtype: str, residual: str | None) -> str:
    what = "scales" if jnp.issubdtype(dtype, jnp.integer) else "a residual"
    return f"{dtype} with {what} of {residual}" if residual else dtype


def _one_kind(a: str, b: str) -> bool:
    if a == b:
        return True
    if "key<" in a + b:
        return False
    kinds = jnp.floating, jnp.integer, jnp.complexfloating
    return any(jnp.issubdtype(a, kind) and jnp.issubdtype(b, kind) for kind in kinds)


def differences(missing: Iterable[str], extra: Iterable[str]) -> str:
    """Returns in words the names that the checkpoint lacks, and those that ``like`` lacks."""
    lacks = (("It", [*map(repr, missing)]), ("like", [*map(repr, extra)]))
    return "".join(f"{who} lacks {first_of(names)}. " for who, names in lacks if names)


# ---- from the arrays that were read to those of the state ---------------------------------------


def converted(sources: list[Source], arrays: Mapping[str, jax.Array], like: Any, where: str) -> Any:
    """Returns a tree like ``like``, made of the arrays that were read, by path.

    Raises:
        ValueError: If a finite value would become infinite, or a leaf would be narrowed by JAX.
    """
    leaves, overflown = [], []
    for source in sources:
        target, path = source.target, source.path
        if path is None:
            leaves.append(_own(target, where))
            continue
        read, dtype = arrays[path], shaped(target.value)[1]
        if source.companion is not None:
            read = _whole(jnp.asarray(read), jnp.asarray(arrays[source.companion]))
        leaf = read
        if source.kind is not None:
            # Residuals and codes are made anew, because those of another policy do not fit.
            leaf = _part(source, jnp.asarray(read, FLOAT32))
        elif str(leaf.dtype) != dtype:
            # NumPy would warn of an overflow, which is refused below by the name of the leaf.
            with np.errstate(over="ignore"):
                leaf = jnp.asarray(leaf.astype(np.dtype(dtype)))
        # A residual is no value by itself: what overflows shows in its parameter.
        if not is_companion(target.means) and leaf is not read and overflows(read, leaf):
            overflown.append(f"{target.path} ({read.dtype} to {dtype})")
        place = place_of(target.value)
        leaves.append(leaf if place is None else jax.device_put(leaf, place))
    if overflown:
        raise ValueError(
            f"like: the checkpoint {where} has finite values that would become infinite in "
            f"{first_of(overflown)}. Restore these leaves in bfloat16 or float32, by another "
            "policy or an override."
        )
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _whole(leaf: jax.Array, companion: jax.Array) -> jax.Array:
    """Returns the float32 value of a 16-bit parameter and its residual, or of codes and scales."""
    code = codes.by_dtype(leaf.dtype)
    return codes.decode(leaf, companion, code) if code else residuals.full(leaf, companion)


def _part(source: Source, value: jax.Array) -> jax.Array:
    """Returns one of the two arrays that represent a value: the leaf, or its residual or scales."""
    assert source.kind is not None
    dtype, kind = map(np.dtype, source.kind)
    if code := codes.by_dtype(dtype):
        first = jnp.int32(0)  # the count of draws
        scales = codes.scales_of(value, code, first)
        parts = codes.encode(value, scales, code, first), scales
    else:
        parts = residuals.split(value, dtype, kind)
    # The bool is the index: first the leaf, then what belongs to it.
    return parts[is_companion(source.target.means)]


def place_of(value: Any) -> Any:
    """Returns the sharding that a leaf of ``like`` is committed to, or None."""
    if isinstance(value, jax.ShapeDtypeStruct) or getattr(value, "committed", False):
        return value.sharding
    return None


def _own(target: Leaf, where: str) -> jax.Array:
    """Copies a leaf of ``like`` that is not in the checkpoint, such as that of a new loss scale.

    The copy protects the caller's array from donation.
    """
    if isinstance(target.value, jax.ShapeDtypeStruct):
        if is_draws(target.means):
            return jnp.zeros(target.value.shape, target.value.dtype)
        raise ValueError(
            f"like[{target.path!r}] is only a shape, but the checkpoint {where} was saved with "
            "another loss scale, so the values of this one must come from like. Pass "
            "like=init(params), or an eval_shape of it with the loss_scale of init(params)."
        )
    return jnp.array(target.value)


def held(value: Any) -> Any:
    """Returns a JAX array, or the NumPy array if JAX would narrow it."""
    if isinstance(value, jax.Array):
        return value
    return jnp.array(value) if is_held(value.dtype) else value


def overflows(wide: Any, narrow: jax.Array) -> bool:
    """Returns whether a cast from ``wide`` to ``narrow`` made a finite value infinite."""
    if not jnp.issubdtype(narrow.dtype, jnp.inexact):
        return False
    # JAX would narrow such an array (`held`), so it is compared on the host.
    if isinstance(wide, np.ndarray):
        return bool(np.any(np.isfinite(wide) & ~np.isfinite(np.asarray(narrow))))
    return bool(_overflows(wide, narrow))


@jax.jit
def _overflows(wide: jax.Array, narrow: jax.Array) -> jax.Array:
    return jnp.any(jnp.isfinite(wide) & ~jnp.isfinite(narrow))
