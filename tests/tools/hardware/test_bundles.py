"""All-reduces of concatenated arrays, taken apart."""

import pytest

from mpjax._src.tools.hardware.bundles import unbundle
from mpjax._src.tools.hardware.flow import MOVED, flow_of, reached
from mpjax._src.tools.hardware.hlo import parse

KERNELS = """HloModule m

%joining (x: f32[4], y: f32[2,2], z: f32[]) -> f32[9] {
  %x = f32[4]{0} parameter(0)
  %y = f32[2,2]{1,0} parameter(1)
  %z = f32[] parameter(2)
  %flat = f32[4]{0} bitcast(%y)
  %one = f32[1]{0} bitcast(%z)
  ROOT %joined = f32[9]{0} concatenate(%x, %flat, %one), dimensions={0}
}

%cutting (s: f32[9], w: f32[2]) -> f32[2] {
  %s = f32[9]{0} parameter(0)
  %w = f32[2]{0} parameter(1)
  %cut = f32[2]{0} slice(%s), slice={[SECOND]}
  ROOT %scaled = f32[2]{0} multiply(%cut, %w)
}
"""
KERNEL = "f32[9]{0} fusion(%a, %b, %c), kind=kLoop, calls=%joining"
PLAIN = "f32[9]{0} concatenate(%a, %flat, %one), dimensions={0}"
AT_ONCE = "%sum = f32[9]{0} all-reduce(%bundle), to_apply=%add"
LATER = """%begun = f32[9]{0} all-reduce-start(%bundle), to_apply=%add
  %sum = f32[9]{0} all-reduce-done(%begun)"""
ENTRY = """
ENTRY %main (a: f32[4], b: f32[2,2], c: f32[], w: f32[2]) -> (f32[4], f32[2], f32[1]) {
  %a = f32[4]{0} parameter(0)
  %b = f32[2,2]{1,0} parameter(1)
  %c = f32[] parameter(2)
  %w = f32[2]{0} parameter(3)
  %bundle.1 = f32[2]{0} bitcast(%w)
  %flat = f32[4]{0} bitcast(%b)
  %one = f32[1]{0} bitcast(%c)
  %bundle = BUNDLE
  SUM
  %first = f32[4]{0} slice(%sum), slice={[FIRST]}
  %second = f32[2]{0} fusion(%sum, %bundle.1), kind=kLoop, calls=%cutting
  %third = f32[1]{0} slice(%sum), slice={[8:9]}
  OTHER
  ROOT %all = (f32[4]{0}, f32[2]{0}, f32[1]{0}) tuple(%first, %second, %third)
}
"""


def module(bundle=KERNEL, sums=AT_ONCE, first="0:4", second="4:6", other=""):
    text = KERNELS + ENTRY
    parts = {"BUNDLE": bundle, "SUM": sums, "FIRST": first, "SECOND": second, "OTHER": other}
    for name, part in parts.items():
        text = text.replace(name, part)
    return parse(text)


def sums(found):
    return [op for op in found.entry.ops.values() if op.opcode.startswith("all-reduce")]


def written(found):
    """What a module says, as plain data."""
    return {
        op.place: (op.opcode, op.shapes, [o.name for o in op.operands], op.attributes)
        for op in found.ops()
    }


@pytest.mark.parametrize("bundle", [KERNEL, PLAIN])
@pytest.mark.parametrize("way", [AT_ONCE, LATER])
def test_unbundled_all_reduce_has_an_operand_and_result_for_each_array(bundle, way):
    found, given = module(bundle, way), module(bundle, way)
    unbundle(found)
    start, done = sums(found)[0], sums(found)[-1]
    assert len(start.operands) == 3
    assert [shape.dims for shape in done.shapes] == [(4,), (4,), (1,)]
    ops, cut = found.entry.ops, found.computations["cutting"].ops["cut"]
    assert all(name in ops for name in given.entry.ops)
    assert written(found)["main", "bundle.1"] == written(given)["main", "bundle.1"]
    flow = flow_of(found)
    for index, name in enumerate("abc"):
        reaches = reached(flow.after, [(ops[name], 0)], MOVED)
        others = {(done, i) for i in range(3)} - {(done, index)}
        assert (done, index) in reaches and not others & reaches.keys()
        result = (ops[("first", "third")[index // 2]], 0)
        assert (result in reaches) == (name != "b")
    assert (cut, 0) in reached(flow.after, [(ops["b"], 0)], MOVED)
    assert (cut, 0) not in reached(flow.after, [(ops["a"], 0)], MOVED)


@pytest.mark.parametrize(
    "change",
    [
        {"second": "3:5"},  # of two of the arrays
        {"first": "1:5"},
        {"other": "%whole = f32[9]{0} negate(%sum)"},
        {"other": "%also = f32[9]{0} negate(%bundle)"},
        {"bundle": "f32[9]{0} negate(%a)"},
    ],
    ids=str,
)
def test_bundle_that_is_not_read_array_by_array_is_left_whole(change):
    given = module(**change)
    before = written(given)
    unbundle(given)
    assert written(given) == before
