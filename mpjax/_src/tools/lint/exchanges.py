"""Rules of the compiled program: the dtypes that devices send each other, and compute in."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from mpjax._src.core.base.dtypes import FLOAT32, dtype_of, shown
from mpjax._src.core.program.graph import Op
from mpjax._src.tools.hardware import hlo
from mpjax._src.tools.hardware.aot import CPU
from mpjax._src.tools.hardware.collectives import collectives, exchanges
from mpjax._src.tools.hardware.flow import MOVED, Flow, Leaf, flow_of, reached
from mpjax._src.tools.hardware.hlo import attribute, parse, runs, source_lines
from mpjax._src.tools.hardware.hlo_costs import asked, matmul
from mpjax._src.tools.lint.program import Program
from mpjax._src.tools.lint.rule import HLO, JAXPR, Compiled, Hit, NotRun, Rule
from mpjax._src.tools.lint.undone import narrows

GATHERS = ("all_gather", "all_gather_invariant", "all_to_all", "sharding_constraint", "reshard")
HALVES = ("bf16", "f16")
# The compiler's name for the float32 sum that replaces an unsupported 16-bit sum.
PROMOTED = "_promoted"
SUMS = ("all-reduce", "reduce-scatter")


def gathers_before_casts(program: Program) -> Iterator[Hit]:
    """Finds float32 arrays that are gathered, and that every reader casts to 16 bits."""
    results = {*program.block.outvars}
    for op in program.named(*GATHERS):
        value = op.outs[0]
        if dtype_of(value) != FLOAT32 or program.is_backward(op) or not _gathers(program, op):
            continue
        readers, moved = program.final_readers(value), program.forward(value)
        # The caller reads a result of the program in float32, so such a gather is not wasted.
        if readers and all(map(narrows, readers)) and results.isdisjoint(moved):
            yield Hit(
                f"{op.name} gathers {shown(op.ins[0])}, and every reader casts the result to 16 "
                "bits.",
                op,
            )


def _gathers(program: Program, op: Op) -> bool:
    """Returns whether an operation gives each device more of an array than it had."""
    sharding = op.params.get("sharding", op.params.get("dst_sharding"))
    if sharding is None:
        return True  # a collective
    shape = op.outs[0].aval.shape
    if sharding.is_fully_replicated:
        return sharding.mesh.size > 1
    # How an array is spread before the constraint is known of arguments alone.
    arrays = dict(zip(program.block.invars, program.call.arrays, strict=True))
    before = (getattr(arrays.get(v), "sharding", None) for v in program.back(op.ins[0], ()))
    return any(
        b is not None and math.prod(b.shard_shape(shape)) < math.prod(sharding.shard_shape(shape))
        for b in before
    )


# ---- in HLO --------------------------------------------------------------------------------------


def half_sums_of_devices(program: Program, compiled: Compiled) -> Iterator[Hit]:
    """Finds 16-bit sums over devices that the partitioner added, of gradients and statistics."""
    sums = {op.name: attribute(op, "to_apply") for op in parse(compiled.after).ops()}
    for row in collectives(compiled.after, compiled.before):
        if row.kind not in SUMS or row.carries not in ("gradients", "statistics"):
            continue
        # A promoted sum adds in float32, but each device has rounded its term to 16 bits before.
        promoted = sums.get(row.exchange, "").endswith(PROMOTED)
        if row.dtype in HALVES or promoted:
            shape = ",".join(map(str, row.shape))
            yield Hit(
                f"{row.devices} devices sum {row.carries} of shape [{shape}] in 16 bits, in an "
                f"operation that the compiler inserted ({row.kind}).",
                None,
                row.source,
            )


def wide_gathers(program: Program, compiled: Compiled) -> Iterator[Hit]:
    """Finds float32 arrays that devices gather, and that are then cast to 16 bits as a whole."""
    module = parse(compiled.after)
    line_of = source_lines(compiled.after)
    flow = flow_of(module)
    for op, *_ in exchanges(module, flow):
        if op.opcode.removesuffix("-start") != "all-gather":
            continue
        # XLA combines several gathers to one, each operand of which has its own readers.
        for index, operand in enumerate(op.operands):
            shape = operand.shapes[0]
            if shape.dtype != "f32" or _was_half(flow, Leaf(operand, 0)):
                continue
            into = [*_casts(flow, Leaf(op, index))]
            if into and all(cast.shapes[0].dtype in HALVES for cast in into):
                yield Hit(
                    f"The program compiled for {compiled.target} gathers {shape} from each "
                    "device, and then casts all of it to 16 bits.",
                    None,
                    next(filter(None, map(line_of, (*into, op))), ""),
                )


def _was_half(flow: Flow, leaf: Leaf) -> bool:
    """Returns whether an array was 16-bit until a compiler without such collectives widened it."""
    return any(op.shapes[0].dtype in HALVES for op, _ in reached(flow.before, [leaf], MOVED))


def _casts(flow: Flow, leaf: Leaf) -> Iterable[hlo.Op]:
    """Returns the first operations that cast an array or compute with it."""
    waiting, seen = [leaf], {leaf}
    while waiting:
        for following, _ in flow.after.get(waiting.pop(), ()):
            op = following.op
            # XLA fuses casts, so the search goes into the kernels that read the array.
            moved = op.opcode in ("parameter", "get-tuple-element", "tuple", "fusion", "copy")
            moved |= op.opcode in ("bitcast", "reshape", "transpose", "all-gather-done", "call")
            if not moved:
                yield op
            elif following not in seen:
                seen.add(following)
                waiting.append(following)


def widened_matmuls(program: Program, compiled: Compiled) -> Iterator[Hit | NotRun]:
    """Finds 16-bit matmuls that the compiled program computes in float32.

    A CPU multiplies float16 in float32, and bfloat16 only if it has instructions for it. That says
    nothing about accelerators.
    """
    if compiled.target == CPU:
        yield NotRun("how a CPU multiplies says nothing about accelerators: pass one as target")
        return
    wanted = asked(compiled.before)
    # The optimized matmul may have lost its line, which the module before still has.
    lines = _lines(compiled.before)
    line_of = source_lines(compiled.after)
    for op, times, _, scope in runs(parse(compiled.after).entry):
        product = matmul(op, times, scope)
        before = wanted.get(product.name) if product else None
        if product is None or product.operands != "f32" or not before:
            continue
        half = next((dtype for dtype in before if dtype in HALVES), "")
        # Several matmuls may have one name: if one was float32 as written, it may be this one.
        if half and before.get("f32", 0) == 0:
            yield Hit(
                f"A matmul of {half} operands runs in float32 on {compiled.target}.",
                None,
                line_of(op) or lines.get(product.name, ""),
            )


def _lines(text: str) -> dict[str, str]:
    """Returns the user's line of each JAX operation of an HLO module."""
    line_of = source_lines(text)
    lines: dict[str, Any] = {}
    for op, times, _, scope in runs(parse(text).entry):
        named = matmul(op, times, scope)
        if named:
            lines.setdefault(named.name, line_of(op))
    return lines


RULES = (
    Rule(
        "gather-before-cast",
        JAXPR,
        "a float32 array that devices gather and then cast to 16 bits",
        "Each device sends and receives twice the bytes, and stores a float32 copy of the gathered "
        "array, although every reader casts it to 16 bits.",
        "Cast each device's shard before the gather: gather w.astype(jnp.bfloat16).",
        gathers_before_casts,
    ),
    Rule(
        "wide-all-gather",
        HLO,
        "a float32 all-gather whose result is cast to 16 bits",
        "XLA may move a cast from before a gather to after it. Devices then send twice the bytes "
        "that the program asked for, and store a float32 copy.",
        "Put jax.lax.optimization_barrier around the 16-bit array before it is gathered, or gather "
        "it in jax.shard_map.",
        wide_gathers,
    ),
    Rule(
        "half-all-reduce",
        HLO,
        "gradients or statistics that the compiler sums over devices in 16 bits",
        "The partitioner places the sum directly after a sharded matmul: in 16 bits, before the "
        "program casts the result to float32. Each device's term and each partial sum is rounded, "
        "and the error grows with the number of devices.",
        "Ask the matmul for a float32 result (preferred_element_type with "
        "precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32), or cast gradients first and average "
        "them in jax.shard_map. mpjax.autocast does this for you.",
        half_sums_of_devices,
    ),
    Rule(
        "widened-matmul",
        HLO,
        "a matmul of 16-bit operands that runs in float32",
        "The device has no unit for this 16-bit dtype. The operands are cast up, and the matmul is "
        "as slow as in float32 or slower, with the precision of 16 bits.",
        "Use the 16-bit dtype that the device has (mpjax.hardware.half_dtype; float16 on V100 and "
        "T4), or float32.",
        widened_matmuls,
    ),
)
