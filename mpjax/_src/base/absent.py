"""Names that people look for in `mpjax` and that are elsewhere in it, or called otherwise.

Only errors read them.
"""

import ast
import functools
import opcode
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mpjax._src.base.errors import nearest, no_attribute

# What to use instead of the names of torch.amp, Apex, Paddle, MindSpore, Keras, Flax, Lightning,
# Accelerate, DeepSpeed and jmp; letter case does not matter.
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
INSTEAD = {
    _LOSS_SCALE: """GradScaler AmpScaler LossScaler LossScaleOptimizer LossScaleManager DynamicScale
        DynamicLossScaleManager FixedLossScaleManager DynamicLossScaler StaticLossScaler scale_loss
        scaler scale unscale unscale_ dynamic_loss_scale loss_scale LossScale DynamicScaler
        ShardedGradScaler get_scaled_loss loss_scaler adjust loss_scaling""",
    _GRADIENT: "value_and_grad grad filter_grad filter_value_and_grad backward",
    _BUILT: """amp initialize prepare Accelerator MixedPrecisionPlugin MixedPrecisionPolicy
        MixedPrecisionOptimizer auto_mixed_precision build_train_network FP16_Optimizer
        amp_optimizer enable_mixed_precision_graph_rewrite wrap_optimizer Trainer fit
        make_train_step train_step build_step wrap mixed FusedAdam BF16Optimizer""",
    _CAST: """half bfloat16 float16 float32 half_precision to_half to_bf16 to_fp16 to_bfloat16
        to_float16 network_to_half convert_network cast_to_compute cast_to_param cast_to_half
        cast_tree tree_cast cast_params cast_inputs cast_floating to_dtype astype""",
    "mpjax.autocast(fun, policy), a function transformation": """auto_cast autocast_mode amp_guard
        auto_mixed_precision_rewrite half_function decorate autocast_fn amp_decorate
        mixed_precision_wrapper autocast_ctx auto_precision""",
    _POLICY: """set_global_policy set_policy set_dtype_policy global_policy set_global_dtype_policy
        set_default_policy use_policy policy_scope set_mixed_precision push_policy pop_policy
        with_policy set_compute_dtype""",
    _REGION: """float_function disable_autocast disable_casts fp32_function
        no_autocast float32_function force_float32 force_fp32 keep_float32""",
    _CUSTOM: "custom_fwd custom_bwd custom_vjp custom_jvp",
    "mpjax.current_policy()": """is_autocast_enabled get_autocast_dtype is_autocast_available
        global_dtype_policy current_dtype get_global_policy get_current_policy""",
    "the op lists of a policy, mpjax.get_policy(...).with_ops(half=..., full=...)": """white_list
        black_list custom_white_list custom_black_list register_half_function op_lists
        register_float_function register_promote_function promote_function""",
    "mpjax.get_policy and mpjax.Policy": "DTypePolicy MixedPrecisionConfig Precision dtype_policy",
    "mpjax.all_finite(tree)": "isfinite is_finite all_isfinite has_inf_or_nan check_finite isnan",
    "mpjax.select(pred, on_true, on_false)": "select_tree tree_select where tree_where",
    "moments=8bit in the policy, or mpjax.optim.with_8bit_moments(optimizer)": """Adam8bit
        AdamW8bit eight_bit_adam""",
    "storage=lean in the policy, or jax.checkpoint": """checkpoint_wrapper remat
        activation_checkpoint""",
    "accumulate_steps= of mpjax.build_train_step": "accumulate accumulate_gradients MultiSteps",
    "mpjax.find_nonfinite(fun, policy)": "debug_nans find_nan find_nans detect_anomaly nan_report",
    "mpjax.recommend_policy()": """is_bfloat16_supported is_float16_supported is_bf16_supported
        best_policy auto_policy default_policy""",
}
_INSTEAD = {name.lower(): instead for instead, names in INSTEAD.items() for name in names.split()}


@functools.cache
def public_names() -> dict[str, list[str]]:
    """Returns where users find each public name, such as "mpjax.hardware.fit_memory"."""
    places: dict[str, list[str]] = {}
    for file in sorted(Path(__file__).parents[2].glob("*.py*"), key=lambda file: file.stem):
        module = "mpjax" if file.stem == "__init__" else f"mpjax.{file.stem}"
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
                for name in ast.literal_eval(node.value):
                    places.setdefault(name, []).append(f"{module}.{name}")
    return places


def suggesting(module: str, names: Iterable[str]) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a public module, which says where a missing name is."""

    def __getattr__(name: str) -> Any:
        raise missing(module, name, names)

    return __getattr__


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
    instead = _INSTEAD.get(name.lower())
    if instead:
        return f" Use {instead}{', or ' * bool(here)}{here}."
    return f" It is {here}." if here else ""
