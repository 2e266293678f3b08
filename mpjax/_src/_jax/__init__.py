"""The only package that reaches into JAX's internals, or knows how its versions differ.

It imports nothing of mpjax. What each function here takes for granted of JAX is a test of its own,
in tests/_jax.
"""

from jax.extend.core import Literal

from mpjax._src._jax.aot import as_if_on_gpu, compile_only
from mpjax._src._jax.barriers import BARRIERS, GPUS, again_barrier, cpu_barrier, gpu_barrier
from mpjax._src._jax.calls import linearized_once
from mpjax._src._jax.convolutions import half_conv
from mpjax._src._jax.partitioning import answer_partitioning, ask_elsewhere
from mpjax._src._jax.programs import (
    abstract,
    aval_of,
    bind,
    cleared_with_jax,
    equation_key,
    eval_closed,
    hoisted,
    in_avals,
    inlined,
    inner_jaxprs,
    is_array,
    is_explicit,
    is_sharded_along,
    open_jaxpr,
    primitive_names,
    programs_in,
    retyped,
    scan_counts,
    shard_shape,
    size_of,
    trace,
    tracing_key,
    typed_as,
)
from mpjax._src._jax.rules import (
    custom_jvp_rule,
    custom_vjp_rules,
    in_taylor_mode,
    shard_map,
    zero_tangent,
)
from mpjax._src._jax.sources import (
    below,
    common_stack,
    inside,
    line_key,
    location,
    passed_through,
    scope_names,
    source_line,
    transforms,
)
from mpjax._src._jax.wire import contracted_last, half_dot, half_gather, placed_freely

__all__ = (
    "BARRIERS",
    "GPUS",
    "Literal",
    "abstract",
    "again_barrier",
    "answer_partitioning",
    "as_if_on_gpu",
    "ask_elsewhere",
    "aval_of",
    "below",
    "bind",
    "cleared_with_jax",
    "common_stack",
    "compile_only",
    "contracted_last",
    "cpu_barrier",
    "custom_jvp_rule",
    "custom_vjp_rules",
    "equation_key",
    "eval_closed",
    "gpu_barrier",
    "half_conv",
    "half_dot",
    "half_gather",
    "hoisted",
    "in_avals",
    "in_taylor_mode",
    "inlined",
    "inner_jaxprs",
    "inside",
    "is_array",
    "is_explicit",
    "is_sharded_along",
    "line_key",
    "linearized_once",
    "location",
    "open_jaxpr",
    "passed_through",
    "placed_freely",
    "primitive_names",
    "programs_in",
    "retyped",
    "scan_counts",
    "scope_names",
    "shard_map",
    "shard_shape",
    "size_of",
    "source_line",
    "trace",
    "tracing_key",
    "transforms",
    "typed_as",
    "zero_tangent",
)
