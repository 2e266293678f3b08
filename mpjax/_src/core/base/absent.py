"""Names that people look for in `mpjax` and that are elsewhere in it, or called otherwise.

Only errors read them.
"""

import ast
import functools
import opcode
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from mpjax._src.core.base.errors import nearest, no_attribute
from mpjax._src.core.base.patterns import matches

C = TypeVar("C", bound=type)

# What to use instead of the names of torch.amp, Apex, Paddle, MindSpore, Keras, Flax, Lightning,
# Accelerate, DeepSpeed and jmp.
_LOSS_SCALE = (
    'mpjax.mixed_precision(optimizer, "mixed_float16"), which scales the loss and skips '
    "non-finite steps, or mpjax.DynamicLossScale in a loop of your own"
)
_GRADIENT = "value_and_grad of the optimizer that mpjax.mixed_precision returns"
_BUILT = (
    "mpjax.mixed_precision(optimizer, policy), mpjax.build_train_step for a whole step, or "
    "mpjax.autocast(fun, policy) without training"
)
_CAST = 'mpjax.cast(tree, "bfloat16"), or mpjax.autocast to cast each operation by its rule'
_POLICY = (
    'the argument policy="mixed_bfloat16" of mpjax.autocast, mpjax.mixed_precision and '
    "mpjax.build_train_step: there is no global policy"
)
_REGION = 'mpjax.precision("float32"), for a part of a function'
_CUSTOM = (
    'jax.custom_vjp as it is; @mpjax.precision("float32") or @mpjax.half_inputs chooses the dtype '
    "of its inputs"
)
# The first pattern that fits counts; one with * does not for names that are nearly public ones.
INSTEAD = {
    _LOSS_SCALE: """LossScaleOptimizer DynamicLossScaler StaticLossScaler dynamic_loss_scale *scale
        *scaler *lossscale* unscale_ scale_loss *scaled_loss *scaling adjust""",
    _GRADIENT: "value_and_grad grad filter_grad filter_value_and_grad backward",
    "mpjax.current_policy()": """is_autocast_* get_autocast_* global_dtype_policy
        current_dtype get_*_policy""",
    "the op lists of a policy, mpjax.get_policy(...).with_ops(half=..., full=...)": """*white_list
        *black_list op_lists register_*_function promote_function""",
    "mpjax.get_policy and mpjax.Policy": "DTypePolicy dtype_policy MixedPrecisionConfig Precision",
    _POLICY: """set_policy set_*policy set_mixed_precision set_*_dtype use_policy push_policy
        pop_policy with_policy policy_scope global_policy""",
    "mpjax.autocast(fun, policy), a function transformation": """auto_cast autocast_* amp_guard
        *decorate half_function *_precision_rewrite *_precision_wrapper auto_precision""",
    _BUILT: """amp initiali?e* prepare Accelerator MixedPrecision* *mixed_precision* *_optimizer
        BF16Optimizer build_train_network *train_step build_step Trainer fit wrap mixed
        FusedAdam""",
    _REGION: "float_function *32_function disable_*cast* no_autocast force_*32 keep_float32",
    _CAST: """half bfloat16 float16 float32 half_precision to_half to_*16 to_dtype network_to_half
        convert_network cast_* tree_cast astype""",
    _CUSTOM: "custom_fwd custom_bwd custom_vjp custom_jvp",
    "mpjax.all_finite(tree)": "*isfinite all_isfinite is_finite has_inf_or_nan check_finite isnan",
    "mpjax.select(pred, on_true, on_false)": "select_tree tree_select where tree_where",
    "moments=8bit in the policy, or mpjax.optim.with_8bit_moments(optimizer)": "*8bit eight_bit_*",
    "storage=lean in the policy, or jax.checkpoint": """checkpoint_wrapper *_checkpoint* remat
        recompute*""",
    "accumulate_steps= of mpjax.build_train_step": "accumulate* MultiSteps",
    "mpjax.find_nonfinite(fun, policy)": "debug_nans find_nan* detect_anomaly nan_report",
    "mpjax.checkpoint.restore(directory, like)": "load load_* restore_* from_checkpoint",
    "optax.clip_by_global_norm in the optimizer that mpjax.mixed_precision wraps": "clip_*",
    "jax.lax.stop_gradient": "no_grad* inference_mode detach",
    "jax.jit around the function that mpjax returns": "jit compile",
    "Transformer Engine, Qwix or AQT in a function under mpjax.autocast": "*fp8* *int8* *quantize*",
    "parameters with a jax.sharding.NamedSharding: mpjax follows it": "FSDP* *data_parallel shard*",
    "mpjax.recommend_policy()": "is_*16_supported best_policy auto_policy default_policy",
}

# The same for attributes of our objects, by the pattern of their class.
_SAVE = "mpjax.checkpoint.save(directory, state)"
_UPDATE = (
    "updates, state = optimizer.update(grads, state, params), then params = "
    "optax.apply_updates(params, updates), of the optimizer that mpjax.mixed_precision returns"
)
ATTRIBUTES = {
    "Policy": {
        "param_dtype, compute_dtype or output_dtype": "*dtype *precision",
        "cast_to_param(tree), cast_to_compute(tree) or cast_to_output(tree)": "cast* to astype",
    },
    "MixedPrecision": {
        _UPDATE: "step apply* minimize",
        "value_and_grad, which returns new gradients in each step": """zero_grad clear_grad*
            backward grad compute_gradients scale* unscale*""",
        _SAVE: "*state_dict save",
    },
    "*LossScale": {
        _UPDATE: "step apply* minimize",
        "adjust(grads_finite)": "update",
        "loss_scale": "get_scale value current*",
        _SAVE: "*state_dict save",
    },
    "TrainState": {
        "state, metrics = step(state, batch), the step of mpjax.build_train_step": "apply*",
        "opt_state": "opt optimizer* tx",
        _SAVE: "*state_dict save",
    },
}


@functools.cache
def public_names() -> dict[str, list[str]]:
    """Returns where users find each public name, such as "mpjax.hardware.fit_memory"."""
    places: dict[str, list[str]] = {}
    for file in sorted(Path(__file__).parents[3].glob("*.py*"), key=lambda file: file.stem):
        module = "mpjax" if file.stem == "__init__" else f"mpjax.{file.stem}"
        # Parsed, not imported: a module may need a package that is not installed.
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
                for name in ast.literal_eval(node.value):
                    places.setdefault(name, []).append(f"{module}.{name}")
    return places


def missing(module: str, name: str, own: Iterable[str]) -> Exception:
    """Returns the error for a name that a public module lacks, with where it or its successor is.

    ``from module import name`` hides what an AttributeError says, so it gets an ImportError.

    Args:
        module: The module.
        name: The name.
        own: The names that the module has.
    """
    what = f"module {module!r}"
    if name.startswith("_"):  # asked for by Python and its tools
        return no_attribute(what, name, ())
    hint = hint_for(module, name)
    if not hint and not nearest(name, own, count=1):
        near = nearest(name, public_names(), count=1)
        hint = f" Did you mean {public_names()[near[0]][0]}?" if near else ""
    error = no_attribute(what, name, own, hint)
    asking = sys._getframe(2)  # the caller of the module's __getattr__
    if opcode.opname[asking.f_code.co_code[asking.f_lasti]] == "IMPORT_FROM":
        return ImportError(f"cannot import name {name!r}: {error}", name=module)
    return error


def hint_for(module: str, name: str) -> str:
    """Returns where a name that a public module lacks is, or what replaces it, or ""."""
    if not module.startswith("mpjax") or "._src" in module:
        return ""
    here = " or ".join(public_names().get(name, ()))
    typo = nearest(name, public_names(), count=1, cutoff=0.9)
    instead = next((i for i, n in _rows(INSTEAD, name) if not ("*" in n and typo)), None)
    if instead:
        return f" Use {instead}{', or ' * bool(here)}{here}."
    return f" It is {here}." if here else ""


def _rows(table: dict[str, str], name: str) -> Iterator[tuple[str, str]]:
    """Yields what to use instead of a name, and the pattern that it fits."""
    return ((i, n) for i, names in table.items() for n in names.split() if matches(n, name))


def answering(cls: C, look: Callable[[Any, str], None] = lambda self, name: None) -> C:
    """Decorates a class whose objects say what to use instead of an attribute that they lack.

    ``look`` raises an AttributeError if it knows better.
    """
    tables = (table for pattern, table in ATTRIBUTES.items() if matches(pattern, cls.__name__))
    table, what = next(tables, {}), f"{cls.__name__!r} object"

    def lacking(self: Any, name: str) -> Any:
        if hasattr(cls, name):  # a property that raised an AttributeError
            return object.__getattribute__(self, name)
        if name.startswith("_"):  # looked up by copy, pickle and notebooks
            raise no_attribute(what, name, ())
        look(self, name)
        instead = next((f" Use {i}." for i, _ in _rows(table, name)), "")
        raise no_attribute(what, name, [n for n in dir(cls) if not n.startswith("_")], instead)

    setattr(cls, "__getattr__", lacking)  # noqa: B010  (type checkers need not know it)
    return cls
