"""An optax transformation that stores the moments of an optimizer in 8 bits."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.base.errors import brief, misplaced
from mpjax._src.core.base.patterns import path_of
from mpjax._src.core.base.public import public
from mpjax._src.core.base.trees import is_floating
from mpjax._src.core.training import optimizers
from mpjax._src.optim.codes import SIGNED, UNSIGNED, Code, decode, encode, scales_of

# Leaves with fewer entries are not coded, because they take little memory in all.
SMALLEST = 4096

Table = Mapping[str, Mapping[str, str]]
CODES = {"signed": SIGNED, "unsigned": UNSIGNED}
# The moments that are stored in 8 bits, by class and field: decaying averages of gradients
# ("signed"), and of their squares or magnitudes ("unsigned"). Not stored in 8 bits are: masters and
# averages of weights, because all their bits matter; sums that never decay; the input of a running
# maximum, which would keep rounding errors (AMSGrad); moments that are subtracted from each other
# (centered RMSProp).
MOMENTS: Table = {
    "TraceState": {"trace": "signed"},
    "ScaleByAdamState": {"mu": "signed", "nu": "unsigned"},
    "ScaleByAmsgradState": {"mu": "signed"},
    "ScaleByBeliefState": {"mu": "signed", "nu": "unsigned"},
    "ScaleByLionState": {"mu": "signed"},
    "ScaleByNovogradState": {"mu": "signed"},
    "ScaleByRmsState": {"nu": "unsigned"},
    "ScaleByRmsWithCountState": {"nu": "unsigned"},
    "MuonState": {"mu": "signed"},
}


@public("mpjax.optim")
@optimizers.of_ours
class EightBitMomentsState(NamedTuple):
    """State of `with_8bit_moments`.

    Attributes:
        inner_state: The state of the inner optimizer, with its moments replaced by int8 or uint8
            codes of the same shape.
        scales: The scales of the codes, by the path of each tree of moments: a tree of uint8
            exponents, one for every 32 entries along the last axis, with ``optax.MaskedNode()`` for
            a leaf that is not coded.
        rounded: The number of updates so far, an int32 scalar.
    """

    inner_state: optax.OptState
    scales: dict[str, Any]
    rounded: jax.Array


def with_8bit_moments(
    inner: optax.GradientTransformation,
    moments: Table | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Stores the moments of an optimizer in 8 bits between its updates.

    ``inner`` sees float32 moments and computes as usual. Between updates each entry takes one byte,
    plus one byte for every 32 entries: 1.03 bytes instead of 4. The moments of Adam and its
    relatives (adamw, nadam, adamax, lamb, AdaBelief, Yogi), of momentum, Lion, RMSProp, NovoGrad
    and Muon are coded. Everything else keeps its dtype: masters, averages of weights, sums that
    never decay, running maxima, factored moments, and leaves of fewer than 4,096 entries.

    Rounding is stochastic, so its mean is exact, and averages that change slowly are not stuck. The
    random bits depend on the entry and on the number of updates, so a run is reproducible bit for
    bit on any number of devices. A nonzero second moment is never rounded to zero, because dividing
    by its root would make the step infinite. Inf and NaN are preserved: in the next update the
    whole block of 32 entries is Inf or NaN. ``inner.update`` is traced twice, and its side effects
    (printing, host callbacks) happen twice.

    Args:
        inner: Any optax optimizer.
        moments: Additional moments, for your own optimizer, as {name of a state class:
            {field: "signed" or "unsigned"}}. They take precedence over the built-in ones. Use
            "unsigned" for values that are never negative and that the update divides by.

    Returns:
        An optax transformation. Extra arguments of ``update`` are passed to ``inner``.

    Raises:
        TypeError: If ``inner`` is not an optax optimizer.
        ValueError: If ``moments`` has a value other than "signed" and "unsigned"; from ``update``,
            if the state was created by a different optimizer.

    Example:
        >>> import jax.numpy as jnp, mpjax, optax
        >>> optimizer = mpjax.optim.with_8bit_moments(optax.adamw(1e-3))
        >>> state = optimizer.init(jnp.ones((64, 64)))
        >>> adam = state.inner_state[0]
        >>> adam.mu.dtype, adam.nu.dtype, state.scales["0/mu"].shape
        (dtype('int8'), dtype('uint8'), (64, 2))

    Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization",
    https://arxiv.org/abs/2110.02861; FlashOptim 2026, https://arxiv.org/abs/2602.23349.
    """
    inner = optimizers.as_optimizer(inner, "inner")
    table = {**MOMENTS, **_checked({} if moments is None else moments)}

    def coded(state, scales, number):
        return _translated(functools.partial(encode, number=number), state, scales, table)

    def init(params):
        state, number = optimizers.first_state(inner, params), jnp.zeros((), jnp.int32)

        def first(x, code):
            return scales_of(x, code, number) if _is_kept(x) else optax.MaskedNode()

        scales = _each(first, table, state)
        return EightBitMomentsState(coded(state, scales, number), scales, number)

    def update(updates, state, params=None, **extra_args):
        optimizers.check_kind(state, EightBitMomentsState, "with_8bit_moments")
        _check_scales(state, table)

        def advance(codes, scales):
            before = _replaced(state.inner_state, codes, table)
            before = _translated(decode, before, scales, table)
            with optimizers.for_state(inner, before, params, updates):
                return inner.update(updates, before, params, **extra_args)

        def again(x, code, old):
            return old if optimizers.is_masked(old) else scales_of(x, code, number)

        # Twice: a block's scale is known only when all of the block is. The first pass is only for
        # the scales; XLA recomputes behind the barrier instead of writing all moments in float32.
        number = state.rounded + 1
        codes = {path: tree for path, (tree, _) in _moments(state.inner_state, table).items()}
        _, once = advance(codes, state.scales)
        new = _each(again, table, once, state.scales)
        codes, scales, new = jax.lax.optimization_barrier((codes, state.scales, new))
        updates, after = advance(codes, scales)
        return updates, EightBitMomentsState(coded(after, new, number), new, number)

    return optax.GradientTransformationExtraArgs(init, update)


def _moments(state: Any, table: Table) -> dict[str, tuple[Any, Code]]:
    """Returns the trees of moments in a state and the code of each, by path."""
    moments, has_moments = {}, _holds_moments(table)
    for keys, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=has_moments):
        for field, kind in table[type(node).__name__].items() if has_moments(node) else ():
            path = path_of((*keys, jax.tree_util.GetAttrKey(field)))
            moments[path] = getattr(node, field), CODES[kind]
    return moments


def _each(fun: Callable[..., Any], table: Table, state: Any, *rest: Any) -> dict[str, Any]:
    """Maps ``fun(leaf, code, *others)`` over moments; ``rest`` holds trees by the same paths."""

    def mapped(path, tree, code):
        return jax.tree.map(lambda x, *xs: fun(x, code, *xs), tree, *(r[path] for r in rest))

    return {path: mapped(path, *row) for path, row in _moments(state, table).items()}


def _replaced(state: Any, new: Mapping[str, Any], table: Table) -> Any:
    """Returns a state whose moments are replaced by trees in the order of `_moments`."""
    has_moments, trees = _holds_moments(table), iter(new.values())

    def replace(node):
        if not has_moments(node):
            return node
        return node._replace(**{field: next(trees) for field in table[type(node).__name__]})

    return jax.tree.map(replace, state, is_leaf=has_moments)


def _translated(how: Callable[..., Any], state: Any, scales: dict[str, Any], table: Table) -> Any:
    """Returns a state whose moments are encoded or decoded wherever they have scales."""

    def each(x, code, scale):
        return x if optimizers.is_masked(scale) else how(x, scale, code)

    return _replaced(state, _each(each, table, state, scales), table)


def _holds_moments(table: Table) -> Callable[[Any], bool]:
    return lambda node: type(node).__name__ in table and isinstance(node, tuple)


def _is_kept(leaf: Any) -> bool:
    """Returns whether a moment is stored as codes."""
    narrow = is_floating(leaf) and leaf.dtype.itemsize <= FLOAT32.itemsize
    return narrow and leaf.size >= SMALLEST


def _checked(moments: Table) -> Table:
    if not all(isinstance(x, dict) for x in (moments, *getattr(moments, "values", tuple)())):
        raise TypeError(
            f"moments={brief(moments)} must map names of state classes to their fields, such as "
            f'{{"MyState": {{"average": "signed"}}}}.{misplaced(moments)}'
        )
    wrong = {kind for fields in moments.values() for kind in fields.values()} - set(CODES)
    if wrong:
        raise ValueError(
            f"moments={brief(moments)} must map the fields of a state class to one of "
            f"{list(CODES)}, not {sorted(wrong)}. Use 'unsigned' for values that are never "
            "negative, such as averages of squares."
        )
    return moments


def _check_scales(state: EightBitMomentsState, table: Table) -> None:
    moments = _moments(state.inner_state, table)
    if set(moments) != set(state.scales):
        raise ValueError(
            f"state was created by a different optimizer: it has moments at {sorted(moments)[:5]}, "
            f"but scales for {sorted(state.scales)[:5]}. Pass the state that init or the last "
            "update of this optimizer returned."
        )
