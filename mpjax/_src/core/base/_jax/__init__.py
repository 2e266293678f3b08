"""The only package that uses JAX's internals or depends on differences between its versions.

It imports nothing of mpjax but `lines`. tests/core/base/_jax has a test for each assumption about
JAX that is computed here.
"""

from jax.core import Tracer
from jax.extend.core import Literal

from mpjax._src.core.base._jax import cpu_convolutions, gpu_matmuls  # their lowering
from mpjax._src.core.base._jax.aot import as_if_on_gpu, compile_only
from mpjax._src.core.base._jax.backward import is_scaled
from mpjax._src.core.base._jax.barriers import (
    BARRIERS,
    CARRIER,
    FLOAT16_GRADIENT,
    GPUS,
    again_barrier,
    carried,
    carrier,
    cpu_barrier,
    gpu_barrier,
    held_for_cpu,
    on_transpose,
    row_major,
)
from mpjax._src.core.base._jax.calls import eval_once
from mpjax._src.core.base._jax.convolutions import planned_conv
from mpjax._src.core.base._jax.cpu_matmuls import cpu_flags
from mpjax._src.core.base._jax.jits import call_as_jit, jit_call, jit_of
from mpjax._src.core.base._jax.keys import program_key, rules_key
from mpjax._src.core.base._jax.literals import casts_of_numbers
from mpjax._src.core.base._jax.matmuls import marked
from mpjax._src.core.base._jax.partitioning import answer_partitioning, ask_elsewhere
from mpjax._src.core.base._jax.programs import (
    FASTEST,
    Structure,
    abstract,
    aval_of,
    bind,
    bytes_of,
    called,
    cleared_with_jax,
    close,
    default_precision,
    equation_key,
    eval_apart,
    eval_closed,
    flops_of,
    hoisted,
    in_avals,
    inlined,
    inner_jaxprs,
    is_array,
    is_explicit,
    is_sharded_along,
    may_be_divided,
    numbered,
    open_jaxpr,
    own_precision,
    primitive_names,
    retyped,
    scan_counts,
    shard_shape,
    size_of,
    trace,
    tracing_key,
    typed_as,
    walk,
    with_results,
)
from mpjax._src.core.base._jax.recurrences import recurrence, scanned
from mpjax._src.core.base._jax.rules import (
    in_taylor_mode,
    manual_axes,
    shard_map,
    with_rule,
    zero_tangent,
    zeros_of,
)
from mpjax._src.core.base._jax.sources import (
    in_one_call,
    is_called_directly,
    is_promotion,
    is_written_cast,
    line_key,
    location,
    passed_through,
    scope_names,
    scopes_named,
    source_line,
    source_lines,
    transforms,
)
from mpjax._src.core.base._jax.wire import (
    by_devices,
    half_dot,
    placed_freely,
    planned_gather,
)
