"""The row of an operation in the report of `explain`."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import short_name
from mpjax._src.core.base.higher_order import CALL, higher_order
from mpjax._src.core.base.lines import where
from mpjax._src.core.base.public import public

HALF = ("f16", "bf16")
COMPUTES = (*HALF, "f32", "other")

# The reason of a row of the backward pass begins with this word.
BACKWARD = "backward "


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class Row:
    """One equation of the program.

    Attributes:
        primitive: The name of its primitive.
        scope: The named scopes around it, joined with "/".
        path: The paths of the parameters that it reads, joined with ", ".
        source: The user's line that it comes from, as "file:line".
        before: The dtypes of its operands and results without autocast, such as "f32,f32->f32". ""
            for a cast of the backward pass that would not exist without autocast.
        after: The dtypes under the plan: the dtype it computes in, and the dtypes in which its
            results are stored.
        reason: The reason for the dtype.
        flops: The FLOPs of one run of a matmul or convolution; 0 for other operations.
        times: How often the loops around it run it, as far as that is known.
        forward: The index of the forward row it comes from, for a row of the backward pass.
        left_alone: Whether it runs unchanged, because autocast does not know it or because the
            program asks for it.
        storage: In which dtypes the backward pass gets its results, from which rows it computes
            them again, and for how many readers they are rounded, such as "kept in bf16" or
            "computed again from row 3"; "" if the backward pass reads none of them.
        attention: For a matmul that applies softmax weights to values, under
            ``fused_attention``: the fused kernel that runs the attention, or "xla" and the
            reason why no fused kernel does.
        loss: For the matmul of a loss's logits, under ``chunked_loss``: in which blocks it runs, or
            the reason why it does not.
        library: The library's line that ``source`` calls, as "file:line", or "".
        bytes: The bytes of its operands and results under the plan, for one run; 0 for an equation
            that contains a program, whose equations have their own rows.
    """

    primitive: str
    scope: str
    path: str
    source: str
    before: str
    after: str
    reason: str
    flops: int = 0
    times: int = 1
    forward: int | None = None
    left_alone: bool = False
    storage: str = ""
    attention: str = ""
    loss: str = ""
    library: str = ""
    bytes: int = 0

    @property
    def backward(self) -> bool:
        """Whether it is an equation of the backward pass."""
        return self.reason.startswith(BACKWARD)

    @property
    def computes_in(self) -> str:
        """The dtype it computes in: "f16", "bf16", "f32" or "other"."""
        return computed_in(self.after)

    @property
    def where(self) -> str:
        """Its position in the program, for display: its scope or, without one, its line."""
        return self.scope or where(self.source, self.library)


def turns_of(loops: Sequence[tuple[str, int]]) -> str:
    """Returns the iterations of loops as text."""
    return ", ".join(f"{loop} {i}" for loop, i in loops)


def is_frame(primitive: str) -> bool:
    """Returns whether equations of a primitive only contain a program or order operations."""
    return primitive in _jax.BARRIERS or higher_order(primitive).kind == CALL


def reads_floats(signature: str) -> bool:
    """Returns whether an operation of a signature such as "f32,i32->f32" reads a float."""
    operands = signature.partition("->")[0].split(",")
    return not {"f16", "bf16", "f32", "f64"}.isdisjoint(operands)


def computed_in(signature: str) -> str:
    """Returns the compute dtype, one of `COMPUTES`, for dtypes such as "bf16,f32->f32"."""
    operands, _, results = signature.partition("->")
    dtypes = set(COMPUTES) & set((operands or results).split(","))
    # What reads no float, such as a cast of integers, computes in what it returns.
    dtypes = dtypes or set(COMPUTES) & set(results.split(","))
    return next((name for name in ("f32", "bf16", "f16") if name in dtypes), "other")


def name_of(value: Any) -> str:
    """Returns the short name of the dtype of an array, or of a value of a program."""
    aval = getattr(value, "aval", value)
    return short_name(aval.dtype) if hasattr(aval, "dtype") else str(aval)


def signature_of(ins: Iterable[Any], outs: Iterable[Any]) -> str:
    """Returns the dtypes of operands and results, such as "bf16,f32->f32"."""
    return signature(map(name_of, ins), map(name_of, outs))


def signature(ins: Iterable[str], outs: Iterable[str]) -> str:
    return f"{','.join(dict.fromkeys(ins))}->{','.join(dict.fromkeys(outs))}"
