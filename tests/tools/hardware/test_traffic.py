"""The bytes that one instruction moves: what a kernel reads of operands that it slices or pads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._src.tools.hardware import hlo, hlo_costs
from mpjax._src.tools.hardware.traffic import bytes_moved

A = "f32[64,100]{1,0} parameter(0)"
INDEX = "%i = s32[] parameter(1)\n  %zero = s32[] constant(0)\n"


def moved(inside, *operands):
    """Returns the bytes of one fused kernel whose lines are given."""
    given = ", ".join(f"%x{n}" for n in range(len(operands)))
    arguments = "\n".join(f"  %x{n} = {t} parameter({n})" for n, t in enumerate(operands))
    text = (
        f"HloModule kernel\n%fused (p: f32[1]) -> f32[1] {{\n{inside}\n}}\n"
        f"ENTRY %main (p: f32[1]) -> f32[1] {{\n{arguments}\n"
        f"  ROOT %kernel = f32[1] fusion({given}), kind=kLoop, calls=%fused\n}}\n"
    )
    return bytes_moved(hlo.parse(text).entry.ops["kernel"])


WHOLE, ROWS = 4 * 64 * 100, 4 * 8 * 100
KERNELS = {
    "a slice behind a cast": (
        """  %p = f32[64,100]{1,0} parameter(0)
  %half = bf16[64,100]{1,0} convert(%p)
  %part = bf16[8,100]{1,0} slice(%half), slice={[0:8], [0:100]}
  ROOT %out = bf16[8,100]{1,0} negate(%part)""",
        ["f32[64,100]{1,0}"],
        ROWS + ROWS / 2,
    ),
    "a cast and a pad: as wide as the operand": (
        """  %p = f32[64,100]{1,0} parameter(0)
  %half = bf16[64,100]{1,0} convert(%p)
  %zero = bf16[] constant(0)
  ROOT %out = bf16[64,104]{1,0} pad(%half, %zero), padding=0_0x0_4""",
        ["f32[64,100]{1,0}"],
        WHOLE + 2 * 64 * 104,
    ),
    "a pad that cuts off": (
        """  %p = f32[64,100]{1,0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %out = f32[8,101]{1,0} pad(%p, %zero), padding=-50_-6x0_1""",
        ["f32[64,100]{1,0}"],
        ROWS + 4 * 8 * 101,
    ),
    "a gather of a slice": (
        """  %p = f32[64,100]{1,0} parameter(0)
  %part = f32[64,97]{1,0} slice(%p), slice={[0:64], [0:97]}
  %at = s32[5,2]{1,0} parameter(1)
  ROOT %out = f32[5]{0} gather(%part, %at), offset_dims={}, collapsed_slice_dims={0,1}, \
start_index_map={0,1}, index_vector_dim=1, slice_sizes={1,1}""",
        ["f32[64,100]{1,0}", "s32[5,2]{1,0}"],
        4 * 5 + 4 * 10 + 4 * 5,
    ),
    "a slice of a sum over the first axis": (
        """  %p = f32[2,64,100]{2,1,0} parameter(0)
  %zero = f32[] constant(0)
  %sum = f32[64,100]{1,0} reduce(%p, %zero), dimensions={0}, to_apply=%add
  %part = f32[8,100]{1,0} slice(%sum), slice={[0:8], [0:100]}
  ROOT %out = f32[8,100]{1,0} reverse(%part), dimensions={0}""",
        ["f32[2,64,100]{2,1,0}"],
        2 * ROWS + ROWS,
    ),
    "a slice and all of it": (
        """  %p = f32[64,100]{1,0} parameter(0)
  %part = f32[8,100]{1,0} slice(%p), slice={[0:8], [0:100]}
  %turned = f32[100,64]{1,0} transpose(%p), dimensions={1,0}
  ROOT %out = (f32[8,100]{1,0}, f32[100,64]{1,0}) tuple(%part, %turned)""",
        ["f32[64,100]{1,0}"],
        WHOLE + ROWS + WHOLE,
    ),
    "two readers of one slice, and another slice": (
        """  %p = f32[64,100]{1,0} parameter(0)
  %part = f32[8,100]{1,0} slice(%p), slice={[0:8], [0:100]}
  %other = f32[8,100]{1,0} slice(%p), slice={[8:16], [0:100]}
  %twice = f32[8,100]{1,0} add(%part, %part)
  %less = f32[8,100]{1,0} subtract(%twice, %part)
  ROOT %out = f32[8,100]{1,0} add(%less, %other)""",
        ["f32[64,100]{1,0}"],
        2 * ROWS + ROWS,
    ),
    "a broadcast reads its operand once": (
        """  %p = f32[100]{0} parameter(0)
  %wide = f32[64,100]{1,0} broadcast(%p), dimensions={1}
  ROOT %out = f32[64,100]{1,0} negate(%wide)""",
        ["f32[100]{0}"],
        4 * 100 + WHOLE,
    ),
    "joined parts": (
        """  %p = f32[64,100]{1,0} parameter(0)
  %q = f32[8,100]{1,0} parameter(1)
  ROOT %out = f32[72,100]{1,0} concatenate(%p, %q), dimensions={0}""",
        ["f32[64,100]{1,0}", "f32[8,100]{1,0}"],
        2 * (WHOLE + ROWS),
    ),
    "rows written into an operand": (
        f"""  %p = {A}
  {INDEX}  %row = f32[8,100]{{1,0}} parameter(2)
  ROOT %out = f32[64,100]{{1,0}} dynamic-update-slice(%p, %row, %i, %zero)""",
        ["f32[64,100]{1,0}", "s32[]", "f32[8,100]{1,0}"],
        2 * ROWS + 4,
    ),
    "rows written into zeros": (
        f"""  %p = f32[8,100]{{1,0}} parameter(0)
  {INDEX}  %nothing = f32[] constant(0)
  %zeros = f32[64,100]{{1,0}} broadcast(%nothing), dimensions={{}}
  ROOT %out = f32[64,100]{{1,0}} dynamic-update-slice(%zeros, %p, %i, %zero)""",
        ["f32[8,100]{1,0}", "s32[]"],
        ROWS + 4 + WHOLE,
    ),
    "rows written into a copy": (
        f"""  %p = {A}
  {INDEX}  %row = f32[8,100]{{1,0}} parameter(2)
  %new = f32[64,100]{{1,0}} dynamic-update-slice(%p, %row, %i, %zero)
  ROOT %out = f32[64,100]{{1,0}} tanh(%new)""",
        ["f32[64,100]{1,0}", "s32[]", "f32[8,100]{1,0}"],
        (WHOLE - ROWS) + ROWS + 4 + WHOLE,
    ),
    "a kernel in a kernel": (
        """  %p = f32[64,100]{1,0} parameter(0)
  %part = f32[8,100]{1,0} slice(%p), slice={[0:8], [0:100]}
  ROOT %out = f32[8,100]{1,0} fusion(%part), kind=kCustom, calls=%inner
}
%inner (q: f32[8,100]) -> f32[8,100] {
  %q = f32[8,100]{1,0} parameter(0)
  ROOT %half = f32[8,100]{1,0} negate(%q)""",
        ["f32[64,100]{1,0}"],
        2 * ROWS,
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_reads_the_entries_that_its_results_need(name):
    inside, operands, expected = KERNELS[name]
    assert moved(inside, *operands) == pytest.approx(expected)


ALONE = """HloModule alone
ENTRY %main (a: f32[64,100], i: s32[]) -> f32[64,100] {
  %a = f32[64,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = f32[] constant(0)
  %none = s32[] constant(0)
  %empty = f32[64,100]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %named = f32[64,100]{1,0} custom-call(%a), custom_call_target="Sharding"
  %sliced = f32[8,100]{1,0} slice(%a), slice={[0:8], [0:100]}
  %cut = f32[8,100]{1,0} pad(%a, %zero), padding=0_-56x0_0
  %picked = f32[8,100]{1,0} dynamic-slice(%a, %i, %none), dynamic_slice_sizes={8,100}
  %wide = f32[64,64,100]{2,1,0} broadcast(%a), dimensions={1,2}
  ROOT %put = f32[64,100]{1,0} dynamic-update-slice(%empty, %sliced, %i, %none)
}
"""


def test_instructions_outside_of_kernels_read_as_much():
    """And custom calls that only place an array, or make room for one, move nothing."""
    found = {name: bytes_moved(op) for name, op in hlo.parse(ALONE).entry.ops.items()}
    assert found["empty"] == found["named"] == 0
    assert found["sliced"] == 2 * ROWS
    assert found["cut"] == 2 * ROWS + 4
    assert found["picked"] == found["put"] == 2 * ROWS + 8
    assert found["wide"] == 65 * WHOLE


AT_THE_EDGE = {
    "slice": lambda x, i: jnp.sin(x[:, 3:40]) + 1,
    "strided": lambda x, i: jnp.sin(x[::2, ::2]),
    "dynamic_slice": lambda x, i: jnp.sin(jax.lax.dynamic_slice(x, (i, 0), (16, 100))),
    "pad": lambda x, i: jnp.pad(jnp.sin(x), ((0, 6), (0, 28))) * 2,
    "concatenate": lambda x, i: jnp.sin(jnp.concatenate([x, -x], 1)),
    "reverse": lambda x, i: jnp.sin(x[::-1]),
    "broadcast": lambda x, i: jnp.sin(x[0]) * jnp.ones((512, 1)),
    "reduce": lambda x, i: jnp.sin(x).sum(0),
}


@pytest.mark.parametrize("name", AT_THE_EDGE)
def test_bytes_are_those_of_xla_for_programs_of_one_kernel(name):
    """XLA also knows slices and pads; it counts the whole operand of a gather in a kernel."""
    x, i = np.zeros((128, 100), np.float32), np.int32(1)
    compiled = jax.jit(AT_THE_EDGE[name]).lower(x, i).compile()
    expected = compiled.cost_analysis()["bytes accessed"]
    assert hlo_costs.costs(compiled.as_text()).bytes == pytest.approx(expected, rel=0.02, abs=200)
