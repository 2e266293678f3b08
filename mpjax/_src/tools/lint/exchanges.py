"""Rules of the compiled program: the dtypes that devices send each other, and compute in."""

import math
from collections.abc import Iterator

from mpjax._src.core.base.dtypes import FLOAT32, dtype_of, shown
from mpjax._src.core.program.graph import EXCHANGES, Op
from mpjax._src.tools.hardware import hlo
from mpjax._src.tools.hardware.aot import CPU
from mpjax._src.tools.hardware.collectives import collectives, exchanges
from mpjax._src.tools.hardware.flow import MOVED, Flow, Leaf, flow_of, reached
from mpjax._src.tools.hardware.hlo import attribute, parse
from mpjax._src.tools.hardware.hlo_costs import asked, matmuls
from mpjax._src.tools.lint.casts import narrows
from mpjax._src.tools.lint.program import Program, all_reached
from mpjax._src.tools.lint.rule import Compiled, Hit, NotRun

GATHERS = EXCHANGES | {"all_to_all"}
HALVES = ("bf16", "f16")
# The compiler's name for the float32 sum that replaces an unsupported 16-bit sum.
PROMOTED = "_promoted"
SUMS = ("all-reduce", "reduce-scatter")
# What casts are looked for behind: XLA fuses them, so also in the kernels that read an array.
PASSED = {"parameter", "get-tuple-element", "tuple", "fusion", "all-gather-done", "call"}
PASSED |= hlo.VIEWS - {"convert"}


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
    flow = flow_of(module)
    for op, *_ in exchanges(module, flow):
        if op.kind != "all-gather":
            continue
        # XLA combines several gathers to one, each operand of which has its own readers.
        for index, operand in enumerate(op.operands):
            shape = operand.shapes[0]
            if shape.dtype != "f32" or _was_half(flow, Leaf(operand, 0)):
                continue
            into = _casts(flow, Leaf(op, index))
            if into and all(cast.shapes[0].dtype in HALVES for cast in into):
                yield Hit(
                    f"The program compiled for {compiled.target} gathers {shape} from each "
                    "device, and then casts all of it to 16 bits.",
                    None,
                    next(filter(None, map(module.line_of, (*into, op))), ""),
                )


def _was_half(flow: Flow, leaf: Leaf) -> bool:
    """Returns whether an array was 16-bit until a compiler without such collectives widened it."""
    return any(op.shapes[0].dtype in HALVES for op, _ in reached(flow.before, [leaf], MOVED))


def _casts(flow: Flow, leaf: Leaf) -> list[hlo.Op]:
    """Returns the first operations that cast an array or compute with it."""

    def following(leaf: Leaf, moves: bool) -> list[Leaf]:
        return [x for x, _ in flow.after.get(leaf, ()) if (x.op.opcode in PASSED) == moves]

    moved = all_reached([leaf], lambda leaf: following(leaf, True))
    return [after.op for each in moved for after in following(each, False)]


def widened_matmuls(program: Program, compiled: Compiled) -> Iterator[Hit | NotRun]:
    """Finds 16-bit matmuls that the compiled program computes in float32.

    A CPU multiplies float16 in float32, and bfloat16 only if it has instructions for it. That says
    nothing about accelerators.
    """
    if compiled.target == CPU:
        yield NotRun("how a CPU multiplies says nothing about accelerators: pass one as target")
        return
    wanted, before, after = asked(compiled.before), parse(compiled.before), parse(compiled.after)
    # The optimized matmul may have lost its line, which the module before still has.
    lines = dict(reversed([(each.name, before.line_of(op)) for each, op in matmuls(before)]))
    for product, op in matmuls(after):
        half = next((dtype for dtype in wanted.get(product.name, ()) if dtype in HALVES), "")
        # Several matmuls may have one name: if one was float32 as written, it may be this one.
        if product.operands == "f32" and half and not wanted[product.name]["f32"]:
            yield Hit(
                f"A matmul of {half} operands runs in float32 on {compiled.target}.",
                None,
                after.line_of(op) or lines.get(product.name, ""),
            )
