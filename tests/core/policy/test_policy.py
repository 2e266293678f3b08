import pickle
import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support import equations

import mpjax
from mpjax._src.core.base._jax import primitive_names
from mpjax._src.core.base.patterns import paths
from mpjax._src.core.base.trees import is_floating
from mpjax._src.core.policy.fields import CHOICES
from mpjax._src.core.policy.policy import ALIASES, LEVELS, NAMES, NORM_PATTERNS

HALVES = ("float16", "bfloat16")
DTYPES = (*HALVES, "float32", "float64")


def policy_of(*dtypes, **settings):
    try:
        return mpjax.Policy(*dtypes, **settings)
    except ValueError:  # two settings that contradict each other
        assume(False)


policies = st.builds(
    policy_of,
    *(st.sampled_from(DTYPES),) * 3,
    overrides=st.dictionaries(st.text(min_size=1), st.sampled_from(DTYPES), max_size=3),
    keep_full=st.lists(st.text(min_size=1), max_size=2),
    master_weights=st.booleans(),
    fused_attention=st.booleans(),
    chunked_loss=st.booleans(),
    **{name: st.sampled_from(choice.values) for name, choice in CHOICES.items()},
    half_ops=st.sets(st.sampled_from(("dot_general", "exp")), max_size=2).map(sorted),
    full_ops=st.sets(st.sampled_from(("tanh", "log")), max_size=2).map(sorted),
    follow_ops=st.sets(st.sampled_from(("add",)), max_size=1).map(sorted),
)


def params():
    return {
        "Dense_0": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
        "LayerNorm_0": {"scale": jnp.ones(2)},
        "head": {"kernel": jnp.ones((2, 2))},
        "count": jnp.arange(2),
    }


def dtypes_of(tree):
    leaves = zip(paths(tree), jax.tree.leaves(tree), strict=True)
    return {path: leaf.dtype.name for path, leaf in leaves}


# ---------------------------------------------------------------- strings


@given(policies)
def test_a_policy_survives_str_repr_and_pickle(policy):
    assert mpjax.get_policy(str(policy)) == policy
    assert eval(repr(policy), {"Policy": mpjax.Policy}) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(mpjax.get_policy(str(policy))) == hash(policy)


def test_spaces_at_the_end_change_nothing():
    text = 'mixed_bfloat16,half_ops=["exp"]'
    assert mpjax.get_policy(text + " ") == mpjax.get_policy(text)


@pytest.mark.parametrize("name", NAMES)
def test_named_policies_print_their_name(name):
    assert str(mpjax.get_policy(name)) == name


@pytest.mark.parametrize(
    ("text", "dtypes"),
    [
        ("params=float32, compute=bf16, output=f32", ("float32", "bfloat16", "float32")),
        ("p=f32,c=f16", ("float32", "float16", "float16")),
        (" p=f32 , c=f16 ", ("float32", "float16", "float16")),
        ("c=f16", ("float32", "float16", "float16")),
        ("p=f16", ("float16", "float16", "float16")),
        ("o=f16", ("float32", "float32", "float16")),
        (" p = full , c = bfloat16 ", ("float32", "bfloat16", "bfloat16")),
        ("bf16", ("bfloat16",) * 3),
        ("full", ("float32",) * 3),
        ("float64", ("float64",) * 3),
        ("float32", ("float32",) * 3),
        ("mixed_float16", ("float32", "float16", "float32")),
        ("Mixed_BFloat16", ("float32", "bfloat16", "float32")),
        ("O0", ("float32",) * 3),
        ("O1:float16", ("float32", "float16", "float32")),
        ("o2:bf16", ("bfloat16", "bfloat16", "float32")),
        ("O3 : float16", ("float16",) * 3),
        ("mixed_float16, output=f16", ("float32", "float16", "float16")),
    ],
)
def test_policy_grammar_sets_dtypes(text, dtypes):
    policy = mpjax.get_policy(text)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == dtypes


@pytest.mark.parametrize("text", ["p=f32,c=f16", "p=f16,c=f32,o=bf16", "f32", "full", "c=bf16"])
def test_get_policy_agrees_with_jmp_where_jmp_has_an_answer(text):
    theirs = jmp.get_policy(text)
    assert mpjax.get_policy(text) == mpjax.get_policy(theirs)
    assert jmp.get_policy("p=f16,c=f32,o=f16").param_dtype == jnp.float16


def test_levels_and_names_of_other_libraries_are_the_same_policies():
    assert mpjax.get_policy("O0") == mpjax.get_policy("float32") == mpjax.get_policy("full")
    for alias, level in ALIASES.items():
        assert mpjax.get_policy(alias) == mpjax.get_policy(level)
    assert str(mpjax.get_policy("BF16-mixed, reduce=half")) == "mixed_bfloat16,reduce=half"
    assert str(mpjax.get_policy("16-true")) == "O3:float16"
    assert mpjax.get_policy("32-true").compute_dtype == mpjax.get_policy("no").compute_dtype == "f4"
    with pytest.raises(ValueError, match="Did you mean 'bf16-mixed'"):
        mpjax.get_policy("bf16-mix")
    o1, o2, o3 = (mpjax.get_policy(f"{level}:float16") for level in ("O1", "O2", "O3"))
    assert (o1.casting, o2.casting, o3.casting) == ("op", "op", "boundary")
    assert (o2.master_weights, o3.master_weights) == (True, False)
    assert o2.keep_full == NORM_PATTERNS and not o3.keep_full


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("half", HALVES)
def test_half_is_given_as_suffix_or_argument(level, half):
    assert mpjax.get_policy(level, half=half) == mpjax.get_policy(f"{level}:{half}")
    assert mpjax.get_policy(f"{level}:{half}", half=half) == mpjax.get_policy(level, half=half)
    assert mpjax.get_policy("half", half=half) == mpjax.get_policy(half)
    assert mpjax.get_policy("c=half", half=jnp.dtype(half)).compute_dtype == half
    text = 'float32, overrides={"*": "half"}'
    assert mpjax.get_policy(text, half=half).override_for("w") == half


def test_half_alone_means_what_the_device_is_best_at():
    assert mpjax.get_policy("half").compute_dtype == mpjax.hardware.half_dtype()
    assert mpjax.get_policy("O2").param_dtype == mpjax.hardware.half_dtype()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mixed_bf16", "Did you mean 'mixed_bfloat16'?"),
        ("mixed-float16", "Did you mean 'mixed_float16'?"),
        ("float16 mixed", "Did you mean 'mixed_float16'?"),
        ("amp_bf16", "Did you mean 'mixed_bfloat16'?"),
        ("mixed 16", "Did you mean 'mixed_float16'?"),
        ("mixed_float17", "Did you mean 'mixed_float16'?"),
        ("fp16 bf16 mixed", "Unknown policy"),
        ("O4", "Unknown policy 'O4' (policy='O4'). Did you mean 'O1:bfloat16'? Choose one of"),
        ("O9", "Unknown policy 'O9' (policy='O9'). Choose one of 'float32', 'mixed_float16'"),
        ("O2:float32", "the suffix='float32' is not a 16-bit dtype. Choose 'float16' or"),
        ("O2:", "policy='O2:': the suffix='' is not a floating dtype"),
        ("bf16:float16", "Unknown policy 'bf16:float16'"),
        ("", "policy='' is empty. Use a name such as float32, mixed_float16"),
        ("  ", "is empty"),
        ('O1,half_ops=[["exp"]]', "half_ops=[['exp']] must be a sequence of strings"),
        ("p=f33", "Did you mean 'f32'?"),
        ("c=", "compute_dtype='' is not a floating dtype"),
        ("c=int8", "compute_dtype='int8' is not a floating dtype"),
        ("param=f32", "'param' is not a key of a policy. Choose one of params, compute, output"),
        ("param=f32", "Did you mean 'params'?"),
        ("p=f32,p=f16", "'p' twice"),
        ("p=f32,params=f16", "'params' twice"),
        ("p=f32,", "ends with a comma"),
        ("p=f32,,c=f16", "expected key=value"),
        ("f32,bf16", "expected key=value at 'bf16'"),
        ("overrides={", "bad JSON"),
        ('overrides={"a":"f32"} c=f16', "expected a comma"),
        ('overrides=["a"]', "must map patterns to dtypes"),
        ('overrides={"a":"f3"}', "overrides['a']='f3' is not a floating dtype"),
        ("casting=ops", "Did you mean 'op'?"),
        ("master_weights=maybe", "must be True or False"),
    ],
)
def test_policy_that_does_not_parse_says_where_and_what_is_legal(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        mpjax.get_policy(text)


@given(st.text(alphabet="mixedfloatb16_o23:=,pc half", min_size=1, max_size=16))
def test_every_suggestion_is_itself_legal(text):
    try:
        mpjax.get_policy(text)
    except ValueError as error:
        suggestion = re.search(r"Did you mean '(.*?)'\?", str(error))
        name = suggestion and suggestion[1]
        if name and name not in ("p", "c", "o", "params", "compute", "output", "op", "overrides"):
            mpjax.get_policy(name)


@pytest.mark.parametrize("wrong", [None, 16, jnp.float16, [16], {"policy": None}])
def test_get_policy_refuses_other_types(wrong):
    with pytest.raises(TypeError, match="must be a string such as 'mixed_bfloat16'"):
        mpjax.get_policy(wrong)


def test_a_suffix_and_half_that_disagree_are_refused():
    with pytest.raises(ValueError, match="asks for float16, but half='bfloat16'"):
        mpjax.get_policy("O2:float16", half="bfloat16")


# ---------------------------------------------------------------- the class


def test_dtypes_are_canonical_on_construction():
    spelled = mpjax.Policy("f32", jnp.bfloat16, np.dtype("float32"), {"*": "f16"})
    assert spelled == mpjax.Policy("float32", "bfloat16", jnp.float32, (("*", jnp.float16),))
    for name in ("param_dtype", "compute_dtype", "output_dtype"):
        assert isinstance(getattr(spelled, name), np.dtype)
    assert hash(spelled) == hash(mpjax.get_policy(str(spelled)))


def test_policy_is_a_jmp_policy():
    policy = mpjax.get_policy("mixed_float16")
    assert isinstance(policy, jmp.Policy)
    assert policy.with_output_dtype(jnp.float16).output_dtype == jnp.float16
    assert mpjax.get_policy(jmp.Policy(jnp.float32, jnp.float16, jnp.float32)) == mpjax.get_policy(
        "p=f32,c=f16,o=f32"
    )
    assert mpjax.get_policy(policy) is policy


def test_policy_is_a_static_argument():
    traces = []

    @partial(jax.jit, static_argnums=0)
    def compute(policy, x):
        traces.append(policy)
        return policy.cast_to_compute(x)

    x = jnp.ones(2)
    assert compute(mpjax.get_policy("mixed_float16"), x).dtype == jnp.float16
    assert compute(mpjax.get_policy("O1:f16"), x).dtype == jnp.float16
    assert compute(mpjax.get_policy("mixed_bfloat16"), x).dtype == jnp.bfloat16
    assert len(traces) == 2


def test_policy_is_frozen():
    with pytest.raises(AttributeError):
        mpjax.get_policy("float32").param_dtype = jnp.float16


# ---------------------------------------------------------------- casts


@pytest.mark.parametrize("jitted", [False, True])
def test_policy_casts_params_compute_and_output(jitted):
    wrap = jax.jit if jitted else lambda f: f
    policy = mpjax.get_policy("p=bf16,c=f16,o=f32")
    kernel = "Dense_0/kernel"
    assert dtypes_of(wrap(policy.cast_to_param)(params()))[kernel] == "bfloat16"
    assert dtypes_of(wrap(policy.cast_to_compute)(params()))[kernel] == "float16"
    assert dtypes_of(wrap(policy.cast_to_output)(params()))[kernel] == "float32"
    assert dtypes_of(wrap(policy.cast_to_compute)(params()))["count"] == "int32"


def test_o2_stores_norms_in_float32_and_computes_in_half():
    policy = mpjax.get_policy("O2:float16")
    stored = dtypes_of(policy.cast_to_param(params()))
    assert stored["LayerNorm_0/scale"] == "float32" and stored["Dense_0/kernel"] == "float16"
    assert dtypes_of(policy.cast_to_compute(params()))["LayerNorm_0/scale"] == "float16"


@pytest.mark.parametrize(
    "path",
    [
        "BatchNorm_0/scale",
        "ln1/scale",
        "ln_f/bias",
        "bn/weight",
        "layer1/bn2/scale",
        "norm/weight",
        "rms_norm/scale",
        "blocks/0/ln_1/scale",
        "GroupNorm_3/bias",
        "stem/gn1/scale",
        "downsample_bn/scale",
    ],
)
def test_o2_knows_norm_layers_by_their_names(path):
    *scopes, name = path.split("/")
    tree = {name: jnp.ones(2)}
    for scope in reversed(scopes):
        tree = {scope: tree}
    stored = mpjax.get_policy("O2:float16").cast_to_param(tree)
    assert jax.tree.leaves(stored)[0].dtype == jnp.float32


@pytest.mark.parametrize("path", ["Dense_0/kernel", "subnet/w", "alnico/w", "cabin/w", "bnb/w"])
def test_o2_takes_nothing_else_for_a_norm(path):
    scope, name = path.split("/")
    stored = mpjax.get_policy("O2:float16").cast_to_param({scope: {name: jnp.ones(2)}})
    assert jax.tree.leaves(stored)[0].dtype == jnp.float16


def test_o2_recognizes_the_norms_of_flax_models():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=True)(nn.Dense(4)(x))
            return nn.GroupNorm(2)(nn.RMSNorm()(nn.LayerNorm()(x)))

    tree = jax.eval_shape(Net().init, jax.random.key(0), jnp.ones((2, 3)))["params"]
    stored = jax.eval_shape(mpjax.get_policy("O2:bf16").cast_to_param, tree)
    for path, dtype in dtypes_of(stored).items():
        assert dtype == ("bfloat16" if path.startswith("Dense") else "float32"), path


# ---------------------------------------------------------------- overrides


@pytest.mark.parametrize("jitted", [False, True])
def test_overrides_decide_storage_and_compute(jitted):
    wrap = jax.jit if jitted else lambda f: f
    policy = mpjax.get_policy("O3:float16").override({"*/HEAD/*": "float32", "*norm*": "bf16"})
    for cast in (policy.cast_to_param, policy.cast_to_compute):
        found = dtypes_of(wrap(cast)(params()))
        assert found["head/kernel"] == "float32"
        assert found["LayerNorm_0/scale"] == "bfloat16"
        assert found["Dense_0/kernel"] == "float16"
    assert dtypes_of(policy.cast_to_output(params()))["head/kernel"] == "float16"


def test_the_first_match_wins_and_a_later_call_goes_first():
    policy = mpjax.get_policy("float32").override({"Dense_0/bias": "f16", "Dense_0/*": "bf16"})
    assert policy.override_for("Dense_0/bias") == jnp.float16
    assert policy.override_for("Dense_0/kernel") == jnp.bfloat16
    assert policy.override({"*": "f32"}).override_for("Dense_0/bias") == jnp.float32
    again = policy.override({"Dense_0/bias": "f32"})
    assert len(again.overrides) == 2 and again.override_for("Dense_0/bias") == jnp.float32


def test_a_pattern_given_twice_means_its_first_dtype():
    policy = mpjax.get_policy('bf16, overrides={"*w": "f32", "*w": "bf16"}')
    assert policy.overrides == (("*w", jnp.float32),)
    assert mpjax.get_policy(str(policy)) == policy


def test_an_override_beats_the_level():
    policy = mpjax.get_policy("O2:float16").override({"*norm*": "float16"})
    assert dtypes_of(policy.cast_to_param(params()))["LayerNorm_0/scale"] == "float16"


@pytest.mark.usefixtures("x64")
def test_an_override_reaches_float64_by_name():
    tree = {"a": jnp.ones(2, jnp.float64), "b": jnp.ones(2, jnp.float64)}
    policy = mpjax.get_policy("mixed_bfloat16").override({"a": "float32"})
    assert dtypes_of(policy.cast_to_param(tree)) == {"a": "float32", "b": "float64"}


def test_check_overrides_refuses_an_unused_pattern_and_casts_do_not():
    policy = mpjax.get_policy("bf16").override({"*/LayerNrm_0/*": "float32"})
    with pytest.raises(ValueError, match=r"'\*/LayerNrm_0/\*' matches no .*'LayerNorm_0/scale'"):
        policy.check_overrides(params())
    policy.cast_to_compute({"x": jnp.ones(2)})
    mpjax.get_policy("O2").check_overrides({"w": jnp.ones(2)})


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"*": "int32"}, r"overrides\['\*'\]='int32' is not a floating dtype"),
        ({"": "f32"}, "must be a non-empty string"),
        ({3: "f32"}, "must be a non-empty string"),
        ("*norm*", "must map patterns to dtypes"),
    ],
)
def test_bad_overrides_are_refused(patterns, message):
    with pytest.raises(ValueError, match=message):
        mpjax.get_policy("float32").override(patterns)


# ---------------------------------------------------------------- op lists


def test_with_ops_sets_op_lists():
    policy = mpjax.get_policy("mixed_bfloat16").with_ops(half=("exp",), full="tanh")
    assert (policy.half_ops, policy.full_ops, policy.follow_ops) == (("exp",), ("tanh",), ())
    more = policy.with_ops(half=("exp", "log"), follow=["add"])
    assert (more.half_ops, more.follow_ops) == (("exp", "log"), ("add",))
    assert str(more).startswith("mixed_bfloat16,half_ops=")


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"half": ("exp",), "full": ("exp",)}, "'exp' is also in half_ops"),
        ({"full": ("expp",)}, r"full_ops: JAX has no primitive named 'expp'. Did you mean 'exp'\?"),
        ({"half": "matmul"}, "JAX has no primitive named 'matmul'"),
        ({"half": None}, "half=None must be a sequence of strings"),
        ({"half": "cholesky"}, "half_ops: JAX cannot compute 'cholesky'"),
        ({"full": "scan"}, "full_ops: 'scan' has no compute dtype"),
    ],
)
def test_bad_op_lists_are_refused(lists, message):
    with pytest.raises(ValueError, match=message):
        mpjax.get_policy("mixed_bfloat16").with_ops(**lists)


def test_op_list_names_are_those_that_jaxprs_print():
    def fun(x):
        y = jax.lax.scan(lambda c, _: (jnp.tanh(c) @ c, None), x, None, length=2)[0]
        return jnp.sum(jax.nn.softmax(y)), jax.lax.ragged_dot(x, x[None], jnp.array([2]))

    names = {eqn.primitive.name for eqn in equations(jax.make_jaxpr(fun)(jnp.ones((2, 2))))}
    assert {"dot_general", "tanh", "exp"} <= names <= primitive_names()


def test_is_floating_is_what_the_casts_go_by():
    assert is_floating(jnp.ones(2, jnp.float16)) and not is_floating(2.0)


def test_what_devices_exchange_is_part_of_a_policy():
    policy = mpjax.get_policy("mixed_bfloat16")
    assert (policy.gather, policy.reduce) == ("half", "float32")
    assert "reduce" not in str(policy)
    for asked in (
        {"reduce": "half"},
        {"gather": "float32"},
        {"gather": "float32", "reduce": "half"},
    ):
        other = policy.replace(**asked)
        assert str(other) == ",".join(("mixed_bfloat16", *(f"{k}={v}" for k, v in asked.items())))
        assert mpjax.get_policy(str(other)) == other != policy
    for bad in ("bfloat16", jnp.float32, ["half"]):
        with pytest.raises(
            ValueError, match="reduce=.* must be 'half' or 'float32'.*sum gradients"
        ):
            policy.replace(reduce=bad)
        with pytest.raises(ValueError, match="gather=.* must be 'half' or 'float32'"):
            policy.replace(gather=bad)
    with pytest.raises(ValueError, match="reduce='f8' must be"):
        mpjax.get_policy("mixed_bfloat16,reduce=f8")
