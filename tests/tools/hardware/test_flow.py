"""The flow of values through HLO: loops, kernels, branches, and what becomes of them."""

import pytest

from mpjax._src.tools.hardware.flow import MAPPED, MIXED, MOVED, SPREAD, SUMMED, flow_of, reached
from mpjax._src.tools.hardware.hlo import parse

# a: moved into a loop, where it is multiplied as a matrix with b; c is added to it in a kernel.
TEXT = """HloModule m

%kernel (x: f32[8,8], y: f32[8,8]) -> (f32[8,8], f32[8]) {
  %x = f32[8,8]{1,0} parameter(0)
  %y = f32[8,8]{1,0} parameter(1)
  %sum = f32[8,8]{1,0} add(%x, %y)
  %zero = f32[] constant(0)
  %rows = f32[8]{0} reduce(%sum, %zero), dimensions={1}, to_apply=%add
  ROOT %both = (f32[8,8]{1,0}, f32[8]{0}) tuple(%sum, %rows)
}

%body (s: (s32[], f32[8,8], f32[8,8], f32[8])) -> (s32[], f32[8,8], f32[8,8], f32[8]) {
  %s = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}, f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %u = f32[8,8]{1,0} get-tuple-element(%s), index=1
  %w = f32[8,8]{1,0} get-tuple-element(%s), index=2
  %k = f32[8]{0} get-tuple-element(%s), index=3
  %v = f32[8,8]{1,0} dot(%u, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}, f32[8]{0}) tuple(%i, %v, %w, %k)
}

%then (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}

%wrapped (q: f32[8]) -> f32[64] {
  %q = f32[8]{0} parameter(0)
  ROOT %g = f32[64]{0} all-gather(%q), replica_groups={}
}

ENTRY %main (a: f32[8,8], b: f32[8,8], c: f32[8,8], d: f32[8], e: pred[]) -> (f32[8,8]) {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %c = f32[8,8]{1,0} parameter(2)
  %d = f32[8]{0} parameter(3)
  %e = s32[] parameter(4)
  %started = ((f32[8]{0}), f32[64]{0}, u32[]) async-start(%d), calls=%wrapped
  %done = f32[64]{0} async-done(%started)
  %chosen = f32[8]{0} conditional(%e, %d, %d), branch_computations={%then, %then}
  %gathered = (f32[8]{0}, f32[64]{0}) all-gather-start(%d), replica_groups={}
  %all = f32[64]{0} all-gather-done(%gathered)
  %start = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}, f32[8]{0}) tuple(%e, %a, %b, %d)
  %loop = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}, f32[8]{0}) while(%start), condition=%c, body=%body
  %out = f32[8,8]{1,0} get-tuple-element(%loop), index=1
  %kept = f32[8]{0} get-tuple-element(%loop), index=3
  %fused = (f32[8,8]{1,0}, f32[8]{0}) fusion(%out, %c), kind=kLoop, calls=%kernel
  %whole = f32[8,8]{1,0} get-tuple-element(%fused), index=0
  %rowsum = f32[8]{0} get-tuple-element(%fused), index=1
  %at = s32[] constant(0)
  %slice = f32[4]{0} dynamic-slice(%kept, %at), dynamic_slice_sizes={4}
  %wide = f32[8,8]{1,0} broadcast(%rowsum), dimensions={0}
  ROOT %r = (f32[8,8]{1,0}, f32[8,8]{1,0}, f32[4]{0}) tuple(%whole, %wide, %slice)
}
"""
MODULE = parse(TEXT)
FLOW, OPS = flow_of(MODULE), MODULE.entry.ops
WAYS = [
    ("a", "whole", MIXED),
    ("b", "whole", MIXED),
    ("c", "whole", MAPPED),
    ("c", "rowsum", SUMMED),
    ("c", "wide", SUMMED),
    ("rowsum", "wide", SPREAD),
    ("d", "slice", MOVED),
    ("d", "chosen", MAPPED),
    ("d", "all", MOVED),
    ("d", "done", MOVED),
    ("e", "chosen", SPREAD),
    ("d", "whole", None),
    ("b", "slice", None),
]


@pytest.mark.parametrize(("source", "target", "kind"), WAYS)
def test_reached_gives_the_kind_of_flow_between_values(source, target, kind):
    source, target = (OPS[source], 0), (OPS[target], 0)
    assert reached(FLOW.after, [source], MIXED).get(target) == kind
    assert reached(FLOW.before, [target], MIXED).get(source) == kind
    for most in range(MIXED + 1):
        seen = reached(FLOW.after, [source], most).get(target)
        assert seen == (kind if kind is not None and kind <= most else None)


def test_flow_lists_arguments_and_results():
    assert [op.name for op, _ in FLOW.arguments] == list("abcde")
    assert FLOW.results == tuple((OPS["r"], index) for index in range(3))


SCATTERED = """HloModule m

ENTRY %main (a: f32[8], u: f32[2], i: s32[2], b: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %u = f32[2]{0} parameter(1)
  %i = s32[2]{0} parameter(2)
  %b = f32[8]{0} parameter(3)
  %placed = f32[16]{0} custom-call(%a, %b), custom_call_target="ConcatBitcast"
  %looked = f32[2]{0} gather(%a, %i), offset_dims={}
  %unknown = f32[8]{0} custom-call(%b), custom_call_target="somebody_s_kernel"
  ROOT %added = f32[8]{0} scatter(%a, %i, %u), to_apply=%add
}
"""


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        ("a", "added", MAPPED),  # entry by entry, what is added to
        ("u", "added", MIXED),  # rows of a batch
        ("b", "placed", MOVED),
        ("b", "unknown", MIXED),
    ],
)
def test_flow_of_a_scatter_tells_adding_from_placing(source, target, kind):
    module = parse(SCATTERED)
    ops = module.entry.ops
    assert reached(flow_of(module).after, [(ops[source], 0)], MIXED)[ops[target], 0] == kind


def test_indices_of_a_gather_are_no_flow_of_values():
    module = parse(SCATTERED)
    ops = module.entry.ops
    assert flow_of(module).before[ops["looked"], 0] == [((ops["a"], 0), MOVED)]
