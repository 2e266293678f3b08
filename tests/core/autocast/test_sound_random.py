"""Random programs under the measure: autocast is about as accurate as rounded matmuls.

The same programs are taken every time, a few of them in the quick tier. What is known to fail is
named, with its cause and a program that must fail: whoever mends one deletes its line.
"""

import jax
import measure
import pytest
import random_programs
from random_operations import OPS
from random_programs import arguments, build, fault, generate, names_in, report, shrink
from support import equations, seed_of_run, thorough_but

from mpjax._src.core.base import rules
from mpjax._src.core.policy.fields import CHOICES

PROGRAMS, CHUNK = 255, 15
FEW = (30, 130, 205)  # those of the quick tier: of each kind, in both 16-bit dtypes
LEAN = range(1000, 1060)  # the programs that are stored by fewest bytes kept
MANY, SHOWN = 3000, 3  # of so many programs, so few may show a known fault

# Programs that random ones led to, mended since; and those that a rule of the planner keeps sound,
# where taking it out makes no random program fail.
MATMUL, SQUARE = ("matmul", 0, 1, ()), ("matmul", 0, 0, ())
LAYER = (("logistic", 1, 0, ()), ("layer", 0, 0, ()), ("matmul", 0, 0, ()), ("matmul", 0, 0, ()))
SWITCHED = (("switched", 0, 0, (("standardize", 0, 0, ()),)), ("fourier", 0, 0, ()))
LOG_SOFTMAX = (("conditional", 0, 0, (("log_softmax", 0, 0, ()),)),)
ONE_HOT = (("write 12 steps of 1", 0, 0, (("sign", 0, 0, ()),)), ("attention", 0, 0, ()))
SOUND = {
    "a softmax that is one-hot in every row, over no more entries than its values have": ONE_HOT,
    "a branch's result that an amplifying operation reads beside a matmul": (
        *LOG_SOFTMAX,
        ("residual", 0, 0, ()),
        ("sharp_softmax", 1, 0, ()),
    ),
    "a phase of what a branch gives, where another one holds a matmul": SWITCHED,
    "a constant that half turns into one": (MATMUL, ("near_one", 0, 0, ()), SQUARE, SQUARE),
    "a tanh whose every entry is near one": LAYER,
    "a phase of a short sum": (("fourier", 0, 1, ()), SQUARE, SQUARE),
    "a large scalar that a loop's body reads": (("scanned", 0, 0, (("times_huge", 0, 0, ()),)),),
}


@pytest.mark.parametrize("seed", FEW)
def test_random_program_is_sound(seed):
    judge([seed])


@pytest.mark.parametrize("seed", thorough_but([LEAN[10], LEAN[31]], 1))
def test_random_program_is_sound_under_lean(seed):
    judge([seed], "lean")


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, PROGRAMS, CHUNK))
def test_random_programs_are_sound(first):
    judge(range(first, first + CHUNK))


@pytest.mark.thorough
@pytest.mark.parametrize("first", LEAN[::CHUNK])
def test_random_programs_are_sound_under_lean(first):
    judge(range(first, first + CHUNK), "lean")


@pytest.mark.thorough
@pytest.mark.parametrize("storage", [*CHOICES["storage"].values, 0.0])
def test_many_random_programs_are_sound(storage):
    first = 10**6 + seed_of_run() % 10**9
    judge(range(first, first + MANY // 2), storage, SHOWN)


def judge(seeds, storage="fast", shown=0):
    wrong = [text for seed in seeds if (text := report(seed, storage))]
    assert len(wrong) <= shown, "\n\n".join(wrong)


PAIRS = [(name, half) for half in random_programs.HALVES for name in SOUND]


@pytest.mark.parametrize(("name", "half"), thorough_but(PAIRS, 0, 1, 9, 10, 11))
def test_programs_recorded_as_sound_stay_sound(name, half):
    assert not fault(SOUND[name], half)


def test_every_operation_is_tried():
    tried = {name for seed in range(PROGRAMS) for name in names_in(generate(seed))}
    assert [name for name in OPS if name not in tried and " steps of " not in name] == []
    assert sum(" steps of " in name for name in tried) > 60


# ---- the rule table -----------------------------------------------------------------------------

# Rows that random programs do not reach, and why.
DEVICES = "needs several devices, or an axis that is mapped over them"
KERNEL = "a kernel or a rule of its author's: runs as written"
BITS = "what it gives depends on the bits of its operands"
LACKING = "only some versions of JAX have it, or use it in what is tried"
PARTS = "what linear algebra is made of: as the rows that are tried, float32 from end to end"
UNTRIED = {
    DEVICES: "all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast pmax pmin "
    "ppermute psum psum_invariant pvary reduce_scatter reshard shard_map sharding_constraint "
    "layout_constraint unreduced_psum vary_unreduced_cast vary_unreduced_cast_p",
    KERNEL: "custom_partitioning ffi_call pallas_call linear_call closed_call reduce "
    "reduce_window cpu_barrier gpu_barrier again_barrier row_major float16_gradient "
    "linear_recurrence rounded carried carrier",
    BITS: "random_gamma rng_uniform",
    LACKING: "log2 one_minus_square stack unstack bitcast_convert_type",
    PARTS: "cholesky_update eig geqp3 geqrf hessenberg householder_product ormqr schur "
    "symmetric_product tridiagonal",
}


def test_every_rule_is_tried_or_says_why_not():
    reached, step = set(), (("tanh", 0, 0, ()),)
    for name, op in OPS.items():
        if op.turns <= 4:
            fun = build(((name, 0, 1, step if op.kind == "program" else ()),))
            reached |= primitives(fun, None)
            reached |= primitives(fun, (0, 1)) if op.derivatives else set()
    untried = {name for names in UNTRIED.values() for name in names.split()}
    missing = sorted(set(rules.RULES) - reached - untried)
    assert not missing, (
        f"Add these to random_operations.OPS, or to UNTRIED with the reason: {missing}"
    )
    assert sorted(reached & untried - set(UNTRIED[LACKING].split())) == []


def primitives(fun, argnums):
    args = arguments(0)
    run = measure._measured(fun, args, argnums, 1.0)
    return {eqn.primitive.name for eqn in equations(jax.make_jaxpr(run)(*args))}


# ---- the tests themselves -----------------------------------------------------------------------


def test_generate_makes_a_program_from_its_seed():
    assert generate(7) == generate(7) != generate(7 + 1000)
    assert "gelu" not in {name for seed in range(50) for name in names_in(generate(seed, ["gelu"]))}


def test_shrink_makes_a_failing_program_small():
    steps = next(s for s in map(generate, range(100)) if len(s) > 3 and "attention" in names_in(s))
    found = shrink(steps, lambda steps: "attention" in names_in(steps))
    assert found == (("attention", 0, 0, ()),)


@pytest.mark.thorough
def test_report_shows_a_failing_program_as_code(monkeypatch):
    def doubled(fun, policy):
        return lambda *args: jax.tree.map(lambda x: 2 * x, fun(*args))

    monkeypatch.setattr(measure.mpjax, "autocast", doubled)
    text = report(4)
    assert "autocast is 1 off" in text
    call = text.splitlines()[1]
    assert eval(call, {"random_programs": random_programs})
