"""Which saved leaf becomes which leaf of the state that is restored, and what is refused.

Nothing is read here: a plan is made from what was written beside the arrays, so that a refusal
costs nothing.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.checkpoint.contents import (
    LOSS_SCALE,
    MASTER,
    RESIDUAL,
    Leaf,
    beside_what,
    is_beside,
    is_draws,
    is_held,
    kinds_of,
    leaves_of,
    part_of,
    settings_of,
    shaped,
)
from mpjax._src.training import residuals
from mpjax._src.training.loss_scale import has_protocol

# How many leaves a message names.
NAMED = 5


class Source(NamedTuple):
    """Where a leaf of the restored state comes from.

    Attributes:
        target: The leaf of ``like``.
        path: The path of the saved leaf, or None: the leaf is taken from ``like``.
        beside: The path of what makes the saved leaf whole: the residual of a half parameter, or
            the scales of codes; or None.
        kind: Where there is such a thing in ``like``, the dtypes of the leaf and of it; or None.
    """

    target: Leaf
    path: str | None
    beside: str | None = None
    kind: tuple[str, str] | None = None


def match(about: dict[str, Any], like: Any, allow_narrowing: bool, where: str) -> list[Source]:
    """Returns the source of every leaf of ``like``, in the order of its leaves.

    A leaf that is saved with the same path, meaning and dtype is taken as it is, bit for bit. Any
    other comes from the most precise copy there is: from the master of a parameter if it has one.

    Args:
        about: What was written beside the arrays.
        like: The state to restore, or a dict of some of its parts.
        allow_narrowing: Whether leaves may lose precision.
        where: The name of the checkpoint, for messages.

    Raises:
        ValueError: If the checkpoint is that of another model or optimizer, or precision would be
            lost.
    """
    saved: dict[str, dict[str, Any]] = about["leaves"]
    by_meaning = {entry["means"]: path for path, entry in saved.items()}
    targets = leaves_of(like)
    fresh = _starts_fresh(about, like)
    parts = set(like) if isinstance(like, Mapping) else {path.split("/")[0] for path in saved}
    held = {t.means: shaped(t.value)[1] for t in targets}

    def source(target: Leaf) -> Source:
        if fresh and target.part == LOSS_SCALE:
            return Source(target, None)
        of = beside_what(target.means)
        residual, now = by_meaning.get(RESIDUAL + of), held.get(RESIDUAL + of)
        was = saved[residual]["dtype"] if residual else None
        # Of parameters that are not restored: a residual of floats is of their dtype.
        half = "bfloat16" if str(now).startswith("uint") else str(now)
        kind = (held.get(of, half), now) if now else None
        same = saved.get(target.path)
        if same and (same["means"], same["dtype"]) == (target.means, shaped(target.value)[1]):
            # Rounded with another remainder, a parameter may be another one.
            rounded_anew = now != was and (now or MASTER + of in held)
            if is_beside(target.means) or not rounded_anew:
                return Source(target, target.path)
        master = by_meaning.get(MASTER + of)
        if master or not residual:
            return Source(target, master or by_meaning.get(of), None, kind)
        return Source(target, by_meaning[of], residual, kind)

    sources = [source(target) for target in targets]
    # Draws may begin anew: all that is asked of them is that they differ from step to step.
    begin = [s for s in sources if s.path is None and is_draws(s.target.means)]
    kept = [s for s in sources if not (fresh and s.target.part == LOSS_SCALE) and s not in begin]
    _check_same_leaves(saved, kept, parts - ({LOSS_SCALE} if fresh else set()), where)
    _check_kinds(about["kinds"], kinds_of(like), where)
    _check_shapes(saved, kept, where)
    if not allow_narrowing:
        _check_precision(saved, kept, where)
    _check_width(kept)
    return sources


def _starts_fresh(about: dict[str, Any], like: Any) -> bool:
    """Tells whether the loss scale is ``like``'s: it is another one, or a setting.

    One that no gradient changes is a setting of the program, so that what the program says holds.
    """
    scale = part_of(like, LOSS_SCALE)
    if settings_of(scale) != about["loss_scale"]:
        return True
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(scale)):
        return False
    return has_protocol(scale) and scale.adjust(False) is scale


def _check_same_leaves(
    saved: dict[str, Any], sources: list[Source], parts: set[str], where: str
) -> None:
    missing = [s.target.path for s in sources if s.path is None]
    wanted = {beside_what(s.target.means) for s in sources}
    # A master whose parameter is restored is not left over: it is what the parameter comes from, or
    # is what _check_precision asks about.
    extra = [
        path
        for path, entry in saved.items()
        if path.split("/")[0] in parts
        and beside_what(entry["means"]) not in wanted
        and not is_draws(entry["means"])
    ]
    if not (missing or extra):
        return
    raise ValueError(
        f"like: the checkpoint {where} is of another model or another optimizer. "
        + differences(missing, extra)
        + "Restore it with the model and the optimizer that it was saved with; to take the "
        "parameters alone, pass like={'params': params}."
    )


def _check_kinds(saved: dict[str, str], like: dict[str, str], where: str) -> None:
    other = [
        f"{path} is a {saved[path]}, in like a {kind}"
        for path, kind in like.items()
        if path in saved and saved[path] != kind
    ]
    if other:
        raise ValueError(
            f"like: the checkpoint {where} is of another optimizer: "
            + "; ".join(other[:NAMED])
            + ". The same names and shapes mean something else there."
        )


def _check_shapes(saved: dict[str, Any], sources: list[Source], where: str) -> None:
    other = [
        f"{s.target.path} has shape {tuple(saved[s.path]['shape'])}, in like "
        f"{shaped(s.target.value)[0]}"
        for s in sources
        if s.path
        and tuple(saved[s.path]["shape"]) != shaped(s.target.value)[0]
        and not (s.kind and is_beside(s.target.means))  # scales, where codes are judged
    ]
    if other:
        raise ValueError(
            f"like: the checkpoint {where} is of another model: " + "; ".join(other[:NAMED]) + "."
        )
    unlike = [
        f"{s.target.path} is {saved[s.path]['dtype']}, in like {shaped(s.target.value)[1]}"
        for s in sources
        if s.path
        and not _one_kind(saved[s.path]["dtype"], shaped(s.target.value)[1])
        and not (s.kind or s.beside)
    ]
    if unlike:
        raise ValueError(
            f"like: leaves of the checkpoint {where} are of another kind: "
            + "; ".join(unlike[:NAMED])
            + ". No cast is meant by that: floating leaves become floating leaves, integers "
            "integers, and keys keys of the same implementation."
        )


def _check_precision(saved: dict[str, Any], sources: list[Source], where: str) -> None:
    held = {s.target.means: shaped(s.target.value)[1] for s in sources}
    best = {entry["means"]: entry["dtype"] for entry in saved.values()}

    def of(dtypes: dict[str, str], means: str) -> tuple[str, str | None]:
        return dtypes.get(MASTER + means) or dtypes[means], dtypes.get(RESIDUAL + means)

    lost = []
    for s in sources:
        if is_beside(s.target.means):
            continue  # judged where its parameter is
        was, now = of(best, s.target.means), of(held, s.target.means)
        if not can_hold(now[0], was[0], now[1], was[1]):
            lost.append(f"{s.target.path} from {_spelled(*was)} to {_spelled(*now)}")
    if lost:
        more = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
        raise ValueError(
            f"like: restoring the checkpoint {where} would narrow "
            + ", ".join(lost[:NAMED])
            + more
            + ". What is lost does not come back: float32 masters that are dropped are weights "
            "that are rounded for good. If that is what you mean, pass allow_narrowing=True; if "
            "not, restore under a policy that keeps float32 parameters or masters."
        )


def _check_width(sources: list[Source]) -> None:
    """Refuses leaves that JAX would narrow by itself."""
    for target, *_ in sources:
        dtype = shaped(target.value)[1]
        if "key<" not in dtype and not is_held(dtype):
            raise ValueError(
                f"like: {target.path} is {dtype}, which JAX holds only under "
                "jax.config.update('jax_enable_x64', True)."
            )


def can_hold(wide: str, narrow: str, *beside: str | None) -> bool:
    """Tells whether a dtype holds every value of another one of its kind.

    Args:
        wide: The name of a dtype.
        narrow: That of another one.
        *beside: The dtypes of what lies beside arrays of the two, where there is something.
    """
    if wide == narrow and len({*beside}) < 2:
        return True
    a, b = np.dtype(wide), np.dtype(narrow)
    if jnp.issubdtype(a, jnp.integer) and not any(beside):
        ranges = jnp.iinfo(a), jnp.iinfo(b)
        return ranges[0].min <= ranges[1].min and ranges[0].max >= ranges[1].max
    pairs = zip(_reach(wide, *beside[:1]), _reach(narrow, *beside[1:]), strict=True)
    return all(x >= y for x, y in pairs)


def _reach(dtype: str, residual: str | None = None) -> tuple[int, int, int]:
    """Returns how many bits a significand has, and how far exponents go up, and down."""
    if residual and jnp.issubdtype(dtype, jnp.integer):
        return 1, 0, 0  # codes: less than any float
    info = jnp.finfo(np.dtype(dtype))
    bits = residuals.KINDS[np.dtype(residual)].bits if residual else info.nmant + 1
    return bits, info.maxexp, bits - info.minexp


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
    """Says what a checkpoint lacks, and what it has beside what is wanted."""
    lacks = _listed("It lacks ", missing, ". ")
    return lacks + _listed("It holds, and like does not, ", extra, ". ")


def _listed(before: str, names: Iterable[str], after: str) -> str:
    names = list(names)
    if not names:
        return ""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return before + ", ".join(map(repr, names[:NAMED])) + more + after
