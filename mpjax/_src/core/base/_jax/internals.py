"""The names of JAX that are not public: which there are, what for, and how each is asked for.

`CONTRACTS` is the only list of them, and this module the only one that names them. Others read them
as its attributes: ``internals.linearize_jaxpr`` is looked up in JAX at its first use, once. One
that is missing raises an `UnsupportedJaxError`, so what does not need it works in any JAX.

What JAX has to be told of our primitives through these names, it is told before the first plan
(`at_first_plan`, `ready`). Whoever runs as JAX's public functions do asks for none of it.
"""

import functools
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from mpjax._src.core.base.errors import PrecisionWarning, UnsupportedJaxError, warn_user

F = TypeVar("F", bound=Callable[..., Any])

# The newest version of JAX that mpjax is tested with.
TESTED = "0.12.0.1"


class Contract(NamedTuple):
    """What users lose if some names of JAX change.

    Attributes:
        modules: The modules of this package that use the names.
        places: The names in JAX. The last part of each, without the underscore in front, is its
            name here.
        breaks: What no longer works.
        instead: The public function that would replace them, if JAX had it.
        optional: Whether the rest works without them, at the loss that ``breaks`` says.
    """

    modules: tuple[str, ...]
    places: tuple[str, ...]
    breaks: str
    instead: str
    optional: bool = False


_AD, _PE = "jax._src.interpreters.ad", "jax._src.interpreters.partial_eval"
_SHARD_MAP, _LOOPS = "jax._src.shard_map", "jax._src.lax.control_flow.loops"
_PARTITIONING, _XLA = "jax._src.custom_partitioning", "jax._src.lib.xla_client"

CONTRACTS = (
    Contract(
        ("aot",),
        (
            "jax._src.lib._jax.mlir.mlir_module_to_xla_computation",
            "jax._src.lib._jax.hlo_module_cost_analysis",
            f"{_XLA}.DeviceList",
        ),
        "compile_for, largest_batch, `mpjax compile`: nothing compiles for absent devices",
        "`jax.stages.Lowered.compile` for the devices of `jax.experimental.topologies`, from "
        "StableHLO",
    ),
    Contract(
        ("aot",),
        (
            "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version",
            "jax._src.cudnn.fused_attention_stablehlo.check_compute_capability",
            "jax._src.cudnn.fused_attention_stablehlo.is_cuda_compute_capability_equal",
        ),
        "compile_for of programs that call dot_product_attention: cuDNN's is not traced",
        "`jax.nn.dot_product_attention` that looks at the devices that it is lowered for",
    ),
    Contract(
        ("backward",),
        (f"{_AD}.backward_pass3",),
        "autocast in float16: gradients without a loss scale are not warned of",
        "a transposition rule that is given the other factors of its cotangent",
        optional=True,
    ),
    Contract(
        ("backward",),
        (f"{_AD}.fancy_transposes",),
        "reports: of some primitives it is not known that they are linear",
        "this table in `jax.interpreters.ad`, beside `primitive_transposes`",
    ),
    Contract(
        ("building",),
        ("jax._src.core.InternalMutableArrayEffect", "jax._src.core.NamedAxisEffect"),
        "autocast: effects of its programs are not told apart",
        "these classes in `jax.extend.core`",
    ),
    Contract(
        ("building",),
        (f"{_AD}.jvp_jaxpr", "jax._src.interpreters.batching.batch_jaxpr"),
        "jax.jvp and jax.vmap of what autocast plans",
        "`jax.interpreters.ad.jvp_jaxpr` and `jax.interpreters.batching.batch_jaxpr`",
    ),
    Contract(
        ("building",),
        ("jax._src.state.discharge.discharge_state",),
        "autocast of programs with Refs of their own",
        "this function in `jax.experimental`",
    ),
    Contract(
        ("building",),
        (
            f"{_SHARD_MAP}._all_newly_manual_mesh_names",
            f"{_SHARD_MAP}._as_manual_mesh",
            f"{_SHARD_MAP}._extend_axis_env",
            "jax._src.config._check_vma",
            "jax._src.core.unshard_aval",
        ),
        "autocast: the derivative of a jax.shard_map is not cut in two",
        "a function that enters the body of a jax.shard_map, and the types outside of it",
    ),
    Contract(
        ("calls", "held"),
        (f"{_AD}.primitive_linearizations",),
        "autocast: JAX cannot transform its programs",
        "this table in `jax.interpreters.ad`, beside `primitive_jvps`",
    ),
    Contract(
        ("calls",),
        (f"{_AD}.LinearizeTrace", f"{_AD}.linearize_jaxpr", f"{_PE}.DynamicJaxprTrace"),
        "gradients of autocast: what is called several times is not differentiated as a whole",
        "`jax.linearize` that takes and returns programs",
    ),
    Contract(
        ("held",),
        (f"{_PE}.custom_staging_rules", "jax._src.interpreters.mlir.ir_consts"),
        "autocast: its programs are neither traced nor lowered",
        "an equation's program that is lowered as that of a `jax.jit` is",
    ),
    Contract(
        ("held",),
        (f"{_PE}.RecomputeType",),
        "autocast under jax.checkpoint with a policy that answers with other values than bools",
        "this class in `jax.ad_checkpoint`, beside `Offloadable`",
    ),
    Contract(
        ("cpu_matmuls", "programs"),
        ("jax.interpreters.mlir._platform_specific_lowerings",),
        "autocast on CPUs: bfloat16 is slower than float32, and some matmuls fail",
        "a lowering rule for a platform that can call the one before it",
    ),
    Contract(
        ("gpu_matmuls", "programs"),
        ("jax.interpreters.mlir._lowerings",),
        "autocast on GPUs: matmuls with an odd axis are slow",
        "a lowering rule for a platform that can call the one before it",
    ),
    Contract(
        ("jits",),
        ("jax.stages.Traced._params", "jax.stages.Traced._consts"),
        "watch_precision: a jitted step cannot be taken apart",
        "public properties of `jax.stages.Traced`",
    ),
    Contract(
        ("literals",),
        (
            f"{_PE}.const_fold_rules",
            "jax._src.lax.lax._convert_element_type",
            "jax._src.numpy.array_constructors.array",
        ),
        "lint: constants that half precision rounds away are not seen",
        "a setting that leaves casts of constants in a traced program",
    ),
    Contract(
        ("partitioning",),
        (
            f"{_PARTITIONING}._CUSTOM_PARTITIONING_CALL_NAME",
            f"{_PARTITIONING}._custom_partitioning_infer_sharding_from_operands",
            f"{_PARTITIONING}._custom_partitioning_partition",
            f"{_PARTITIONING}._custom_partitioning_propagate_user_sharding",
            "jax._src.xla_bridge._plugin_callbacks",
            f"{_XLA}.HloSharding",
            f"{_XLA}.OpSharding",
            f"{_XLA}.Shape",
            f"{_XLA}.register_custom_call_partitioner",
        ),
        "compile_for on several devices, of functions with custom_partitioning",
        "`jax.experimental.custom_partitioning` that serves another process",
    ),
    Contract(
        ("programs",),
        ("jax._src.core.eval_trace",),
        "autocast: comparisons of traced arrays in the metadata of trees stay in the program",
        "`jax.ensure_compile_time_eval` that leaves tracers alone",
        optional=True,
    ),
    Contract(
        ("programs",),
        (f"{_PE}.lower_jaxpr2",),
        "autocast from JAX 0.12 on: programs with jnp.nonzero, searchsorted, frexp or ldexp",
        "`jax.interpreters.partial_eval.lower_jaxpr2`, from JAX 0.12 on",
    ),
    Contract(
        ("programs",),
        ("jax._src.lax.lax.canonicalize_precision",),
        "autocast: matmuls under jax.default_matmul_precision are misread",
        "this function in `jax.lax`",
    ),
    Contract(
        ("programs",),
        (
            "jax._src.export.shape_poly._DimExpr._evaluate",
            "jax._src.export.shape_poly._DimExpr._get_vars",
        ),
        "autocast of programs that are exported with symbolic shapes",
        "a function of `jax.export` that evaluates a symbolic dimension",
    ),
    Contract(
        ("sources",),
        ("jax._src.api_util.InternalFloatingPointError",),
        "autocast under jax_debug_nans: the error names no line",
        "this class in `jax.errors`",
        optional=True,
    ),
    Contract(
        ("sources",),
        ("jax._src.source_info_util.user_frames",),
        "explain, find_nonfinite, compare and lint: lines are lost",
        "this function in `jax.extend.source_info_util`, beside `summarize`",
    ),
    Contract(
        ("sources",),
        ("jax._src.source_info_util._source_info_context",),
        "explain and compare: equations of a custom rule have the line of its call",
        "`jax.extend.source_info_util.user_context` without a traceback",
        optional=True,
    ),
    Contract(
        ("stacks",),
        (f"{_LOOPS}._scan_impl", f"{_LOOPS}._empty_array"),
        "autocast on GPUs: what the backward pass keeps of a loop is filled with zeros first",
        "`jax.lax.scan` that is given the arrays to stack in",
    ),
)

PLACES = {
    place.rpartition(".")[2].lstrip("_"): (place, contract)
    for contract in CONTRACTS
    for place in contract.places
}


def __getattr__(name: str) -> Any:
    """Returns an internal of JAX. The next use finds it without this function."""
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, last = home_of(name)
    found = globals()[name] = getattr(home, last)
    return found


def home_of(name: str) -> tuple[Any, str]:
    """Returns the module or class in which JAX has an internal, and its name there.

    Whoever replaces an internal for a while reads it there, too.
    """
    place, contract = PLACES[name]
    outer, _, last = place.rpartition(".")
    try:
        home = _found(outer)
        getattr(home, last)
    except (ImportError, AttributeError) as error:
        what = f"has no {place}, an internal that mpjax needs here ({contract.breaks})."
        raise UnsupportedJaxError(_refusal(what)) from error
    return home, last


def _found(place: str) -> Any:
    """Returns what is at a place in JAX: a module, or what is in it."""
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError:
        outer, _, last = place.rpartition(".")
        if not outer:
            raise
        return getattr(_found(outer), last)


def offered(name: str, otherwise: Any) -> Any:
    """Returns an internal that the rest works without, or something else in its place."""
    try:
        return globals()[name] if name in globals() else __getattr__(name)
    except UnsupportedJaxError:
        return otherwise


def missing() -> list[tuple[str, Contract]]:
    """Returns the internals that the installed JAX lacks, with what each is for."""
    lacking = []
    for name, row in PLACES.items():
        try:
            home_of(name)
        except UnsupportedJaxError:
            lacking.append(row)
    return lacking


# ---- versions -----------------------------------------------------------------------------------


def is_tested() -> bool:
    """Returns whether the installed JAX is of a minor version that mpjax is tested with."""
    return _minor(jax.__version__) <= _minor(TESTED)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def untested() -> str:
    """Returns what to know of a JAX that is newer than those tested; "" for others."""
    if is_tested():
        return ""
    return (
        f"JAX {jax.__version__} is newer than the newest version that mpjax {_own_version()} is "
        f"tested with, {TESTED}"
    )


def _own_version() -> str:
    return sys.modules["mpjax"].__version__


def _refusal(what: str) -> str:
    """Returns the message for what the installed JAX does not allow."""
    major, minor = _minor(TESTED)
    return (
        f"JAX {jax.__version__} {what} mpjax {_own_version()} is tested with JAX up to {TESTED}. "
        "Use a policy that needs no planner because it casts the arguments of a function once, "
        'such as "O3:bfloat16" or "params=float32,compute=bfloat16,output=float32". Or install '
        "a newer mpjax (pip install -U mpjax), or a JAX that this one is tested with "
        f"(pip install 'jax<{major}.{minor + 1}'). `mpjax doctor` lists what is missing."
    )


# What Python and JAX raise where something is not as it was; and those of them that JAX also raises
# for programs of users.
_SURPRISES = (AttributeError, LookupError, AssertionError, ImportError, NameError)
_OF_PROGRAMS = (TypeError, ValueError, NotImplementedError)
_HERE = f"{Path(__file__).parent}{os.sep}"
_OURS = f"{Path(__file__).parents[3]}{os.sep}"
_JAX = f"{Path(jax.__file__).parent}{os.sep}"


def explain(error: Exception) -> None:
    """Raises an `UnsupportedJaxError` for an error in our use of an untested JAX.

    It is ours if the innermost code outside of JAX is mpjax's: what users wrote is then not at
    fault. But a program of theirs may be, which this package runs: an error of which JAX may say so
    has to come from the call of an internal, or from a call that does not fit.
    """
    if is_tested() or not isinstance(error, (*_SURPRISES, *_OF_PROGRAMS)):
        return
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [c for c in codes if not (c.co_filename.startswith(_JAX) or _is_pythons(c.co_filename))]
    if not own or not own[-1].co_filename.startswith(_OURS):
        return
    asks = own[-1].co_filename.startswith(_HERE) and "internals" in own[-1].co_names
    misfit = own[-1].co_filename.startswith(_HERE) and own[-1] is codes[-1]
    if asks or misfit or isinstance(error, _SURPRISES):
        what = f"behaves otherwise than mpjax expects ({type(error).__name__}: {error})."
        raise UnsupportedJaxError(_refusal(what)) from error


def _is_pythons(file: str) -> bool:
    """Returns whether a file is a module of Python's own, such as contextlib."""
    return os.path.dirname(file) in ("", os.path.dirname(os.__file__))


def guarded(rule: F) -> F:
    """Returns a rule that JAX calls; in an untested JAX, one whose errors are explained."""
    if is_tested():
        return rule

    @functools.wraps(rule)
    def run(*args, **kwargs):
        try:
            return rule(*args, **kwargs)
        except Exception as error:
            explain(error)
            raise

    return run  # type: ignore[return-value]


# ---- what JAX is told before the first plan -----------------------------------------------------

_WAITING: list[Callable[[], None]] = []
_LOCK = threading.RLock()
_WARNED: set[str] = set()


def at_first_plan(register: Callable[[], None]) -> Callable[[], None]:
    """Decorates a function that tells JAX something, through an internal. It is called once."""
    _WAITING.append(register)
    return register


def ready(needed: bool = True) -> None:
    """Tells JAX what it has to know of plans. To be called before one is made.

    Args:
        needed: Whether it raises an `UnsupportedJaxError` if that is not possible, and warns of an
            untested JAX. What is no plan runs without it, though not as fast perhaps.
    """
    if _WAITING:
        failed = _register()
        if failed and needed:
            raise failed
    if needed and jax.__version__ not in _WARNED:
        _WARNED.add(jax.__version__)
        _warn()


def _warn() -> None:
    """Warns of an untested JAX, and of what the installed one lacks and plans do without."""
    optional = (name for name, (_, row) in PLACES.items() if row.optional)
    lacking = [PLACES[name] for name in optional if offered(name, None) is None]
    said = [untested()] if untested() else []
    said += [f"JAX {jax.__version__} has no {place} ({row.breaks})" for place, row in lacking]
    if said:
        warn_user(
            f"{'. '.join(said)}. What is planned may be wrong or slow. Compare a few steps with "
            "float32 (mpjax.compare), or install an older JAX. `mpjax doctor` says which internals "
            "of JAX are missing and, in a checkout, `make canary` which behave otherwise.",
            PrecisionWarning,
        )


def _register() -> UnsupportedJaxError | None:
    """Makes all registrations that wait. Returns the first error; what failed keeps waiting."""
    first: UnsupportedJaxError | None = None
    left: list[Callable[[], None]] = []
    with _LOCK:
        for register in _WAITING:
            try:
                register()
            except UnsupportedJaxError as error:
                first, left = first or error, [*left, register]
        _WAITING[:] = left
    return first
