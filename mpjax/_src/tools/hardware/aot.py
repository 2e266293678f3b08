"""`compile_for`: compiles functions for accelerators that this machine does not have."""

import contextlib
import functools
import inspect
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.interpreters import mlir
from jax.sharding import NamedSharding, get_abstract_mesh, use_abstract_mesh

from mpjax._src.core.base import _jax, errors
from mpjax._src.core.base._jax import building
from mpjax._src.core.base.devices import traced_for
from mpjax._src.core.base.errors import CompileError, brief
from mpjax._src.core.base.patterns import path_of
from mpjax._src.core.base.progress import advance, progress_bar
from mpjax._src.core.program.site import equations
from mpjax._src.tools.hardware.compiler import Options, compilers, require
from mpjax._src.tools.hardware.report import CompileReport, report_of
from mpjax._src.tools.hardware.targets import Target, find_target

# The name of this machine, where a target is expected.
CPU = "cpu"

STAGE = "stage"  # what progress counts: tracing, and compiling

LONGEST = 1e6  # seconds; operating systems limit timeouts
TIMEOUT = 600.0  # seconds, where the user sets none

# What JAX lowers a callback into Python to, where a GPU is; elsewhere it refuses.
CALLBACK = b"python_gpu_callback"


def compile_for(
    target: str,
    fun: Callable[..., Any],
    *args: Any,
    timeout: float = 600.0,
    compiler_options: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> CompileReport:
    """Compiles a function for an accelerator that this machine need not have, and reports its cost.

    XLA's own compiler for the target runs in a separate process. Nothing is executed, and JAX in
    this process is not affected. The results are the same in every run; they change with the
    version of JAX. Without a device, XLA cannot autotune, so a real run may choose other kernels
    with other scratch memory.

    Args:
        target: "v100", "t4", "a100-40", "a100-80", "a6000", "h100", "h200", "b200", "v4", "v5e",
            "v5p" or "v6e". For several devices, "h100 x 8" (GPUs in hosts of eight) or "v5e x 16"
            (a slice): the results are then those of one device, and the report lists collectives.
        fun: A function, jitted or not. Jit it with ``donate_argnums`` like the real program:
            results that do not replace donated arguments need their own memory.
        *args: The arguments of ``fun``: arrays, numbers, `jax.ShapeDtypeStruct` (which need no
            memory), and pytrees of these. For one device, their placement does not matter. For
            several devices, they need a `jax.sharding.NamedSharding`. Its mesh may be a
            `jax.sharding.AbstractMesh`, which needs no devices, or a mesh of as many CPU devices
            (set ``JAX_NUM_CPU_DEVICES``).
        timeout: The time limit of the compiler, in seconds.
        compiler_options: XLA flags, as in `jax.jit`, such as
            ``{"xla_gpu_enable_triton_gemm": False}``. Options of a jitted ``fun`` are not used.
        progress: Whether to show the progress if stderr is a terminal.

    Returns:
        A `CompileReport`.

    Raises:
        ImportError: If the target's compiler is not installed. The message says what to install.
        CompileError: If the compiler rejects the program.
        OutOfMemoryError: If a TPU compiler rejects the program because it does not fit the memory.
            GPU compilers do not; see `CompileReport.fits`.
        TimeoutError: If the compiler takes longer than ``timeout``.
        TypeError: If ``target``, ``fun`` or one of ``args`` has a wrong type.
        ValueError: If an argument is invalid, or if the shardings do not match the target.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
        >>> report = mpjax.compile_for("v100", jnp.dot, x, x)  # doctest: +SKIP
        >>> report.matmul_dtypes  # doctest: +SKIP
        {'f32': 1}

        For eight devices:

        >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
        >>> mesh = AbstractMesh((8,), ("data",))
        >>> x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("data")))
        >>> report = mpjax.compile_for("h100 x 8", jnp.sum, x)  # doctest: +SKIP
        >>> [(row.kind, row.dtype) for row in report.collectives]  # doctest: +SKIP
        [('all-reduce', 'f32')]
    """
    job = job_of(target, timeout, compiler_options, progress, fun=fun)
    require(job.target)
    with progress_bar(progress, f"compile for {job.target.name}", STAGE, total=2):
        program = lower(job.target, fun, args)
        advance(STAGE, "compiling")
        return compile_program(job, program)


# ---- the parts, which fit_memory and largest_batch use too ---------------------------------------


class Job(NamedTuple):
    """What programs are compiled for, and how."""

    target: Target
    timeout: float  # of each compilation, in seconds
    options: Options


def job_of(target: str, timeout: float, options: Any, progress: Any, **functions: Any) -> Job:
    """Returns the arguments that all functions that compile have, checked."""
    errors.check_flag("progress", progress)
    found = find_target(target)
    for name, fun in functions.items():
        errors.check_callable(fun, name)
    if not 0 < (errors.finite_number(timeout) or 0.0) <= LONGEST:
        raise ValueError(
            f"timeout={brief(timeout)} must be a number of seconds greater than 0 and at most "
            f"{LONGEST:g}."
        )
    valid = options is None or (
        isinstance(options, Mapping)
        and all(isinstance(name, str) and name.startswith("xla_") for name in options)
        and all(isinstance(value, bool | int | float | str) for value in options.values())
    )
    if not valid:
        raise ValueError(
            f"compiler_options={brief(options)} must map names of XLA flags to bools, numbers or "
            "strings, such as {'xla_gpu_enable_triton_gemm': False}. Names start with 'xla_', "
            "without dashes."
        )
    return Job(found, timeout, dict(options or {}))


class Program(NamedTuple):
    """A program to compile."""

    stablehlo: bytes  # its StableHLO, as bytecode
    lowered: Any  # the lowered function, which must stay alive until the program is compiled
    left_out: int = 0  # how many calls back into Python are not in it


def lower(
    target: Target, fun: Callable[..., Any], args: Sequence[Any], alone: bool = False
) -> Program:
    """Lowers a function for a target. The arguments may be on any device.

    With ``alone``, its calls back into Python are left out, which need a running device. What they
    would return is not known.
    """
    abstract = jax.tree.map(functools.partial(_abstract, target.devices > 1), tuple(args))
    jitted: Any = fun  # it keeps its donated and static arguments
    # A jitted function may have static arguments, which need not be arrays; `jax.jit` checks them.
    if not (hasattr(fun, "trace") and hasattr(fun, "lower")):
        _check_args(fun, abstract)
        jitted = jax.jit(fun)
    with _lowering_errors(target), _mesh_of(abstract), traced_for(target.chip):
        traced = jitted.trace(*abstract)
        calls = [*_calls_into_python(traced.jaxpr)] if alone else []
        if calls:
            left_out = {eqn.primitive for eqn in calls}
            lowered = _jax.lowered_without(traced, target.platform, left_out)
        else:
            lowered = traced.lower(lowering_platforms=(target.platform,))
        module = lowered.compiler_ir("stablehlo")
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    if CALLBACK in buffer.getvalue():
        raise _calls_back(target)
    partitions = mlir.ir.IntegerAttr(module.operation.attributes["mhlo.num_partitions"]).value
    if partitions != target.devices:
        _tell_of_partitions(target, partitions)
    return Program(buffer.getvalue(), lowered, len(calls))


def compile_program(job: Job, program: Program) -> CompileReport:
    """Compiles a program in a child process and returns the report."""
    return report_of(job.target, _answer(job, program))


def compiled_texts(target: str, fun: Callable[..., Any], args: Sequence[Any]) -> tuple[str, str]:
    """Returns the HLO of a program before and after optimization.

    The target is one of `compile_for`, or "cpu" for this machine.
    """
    if target == CPU:
        lowered = jax.jit(fun).lower(*args)
        module: Any = lowered.compiler_ir("hlo")
        before = module.as_hlo_module().to_string()  # `as_text` would leave out signatures
        return before, lowered.compile().as_text() or ""
    job = Job(find_target(target), TIMEOUT, {})
    require(job.target)
    answer = _answer(job, lower(job.target, fun, args))
    return answer["asked"], answer["hlo"]


# ---- inside --------------------------------------------------------------------------------------


def _answer(job: Job, program: Program) -> dict[str, Any]:
    """Returns what the compiler of a target answers."""

    def partition(question: dict[str, Any]) -> dict[str, Any]:
        with traced_for(job.target.chip):  # for what is defined in Python
            return _jax.answer_partitioning(question)

    # A process for each program: a compiler that crashes must not take others with it.
    with compilers(job.target) as child:
        return child.compile(*job, program.stablehlo, partition)


def _abstract(spread: bool, x: Any) -> Any:
    """Returns the shape and dtype of an array, with its sharding if ``spread`` is set."""
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        weak = bool(getattr(x, "weak_type", False))
        sharding = x.sharding if spread and isinstance(x.sharding, NamedSharding) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak, sharding=sharding)
    return x


def _mesh_of(args: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that sets the mesh of the arguments, which `reshard` and others need.

    A mesh that the user has set is kept, because the program will run under it.
    """
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    mesh = next((s.mesh.abstract_mesh for s in shardings if s is not None), None)
    if mesh is None or not get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return use_abstract_mesh(mesh)


def _calls_into_python(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations that call back into Python."""
    for eqn, _, _ in equations(_jax.open_jaxpr(jaxpr)[0]):
        refers = any(hasattr(v.aval, "inner_aval") for v in eqn.invars)
        acts = building.acts(eqn.effects) and not (refers or _jax.inner_jaxprs(eqn))
        if acts or "callback" in eqn.params:
            yield eqn


def _calls_back(target: Target) -> CompileError:
    return CompileError(
        f"fun cannot be lowered for target={target.name!r}: it calls back into Python "
        "(jax.debug.print, pure_callback, io_callback), which needs a running device. "
        "Remove the callbacks."
    )


def _tell_of_partitions(target: Target, partitions: int) -> NoReturn:
    spread = f"fun is sharded over {partitions} devices" if partitions > 1 else "fun is not sharded"
    if target.devices == 1:
        several = f"{target.name} x {partitions}"
        advice = f"Use target={several!r}, or remove the shardings and sharding constraints."
    elif partitions == 1:
        advice = (
            "Pass arguments with a jax.sharding.NamedSharding. Its mesh may be "
            f"jax.sharding.AbstractMesh(({target.devices},), ('data',)), which needs no devices."
        )
    else:
        advice = "The mesh and the target must have the same number of devices."
    count = "one device" if target.devices == 1 else f"{target.devices} devices"
    raise ValueError(f"{spread}, but target={target.name!r} has {count}. {advice}")


def _check_args(fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
    for keys, leaf in jax.tree_util.tree_leaves_with_path(args):
        if not isinstance(
            leaf, jax.ShapeDtypeStruct | np.ndarray | np.generic | int | float | complex
        ):
            raise TypeError(
                f"args[{path_of(keys)}]={brief(leaf)} must be an array, a number or a "
                "jax.ShapeDtypeStruct. Bind other values with functools.partial or a closure, or "
                "jit the function with static_argnums."
            )
    with contextlib.suppress(ValueError):  # builtins have no signature
        signature = inspect.signature(fun)
        try:
            signature.bind(*args)
        except TypeError as error:
            raise TypeError(
                f"args: fun{signature} cannot be called with the {len(args)} arguments given: "
                f"{error}. Pass the arguments of fun: compile_for(target, fun, *args)."
            ) from None


@contextlib.contextmanager
def _lowering_errors(target: Target) -> Iterator[None]:
    """Explains JAX's errors on lowering for a platform that this machine does not have."""
    try:
        yield
    except (RuntimeError, ValueError, NotImplementedError) as error:
        text = str(error)
        if "different from the lowering platform" in text:
            raise _calls_back(target) from error
        if "require devices" in text:
            raise ValueError(
                f"fun cannot be lowered for target={target.name!r} over an AbstractMesh: it calls "
                "a function with custom_partitioning (cuDNN's attention, Transformer Engine), "
                "which needs a mesh of devices. Use CPU devices: set "
                f"JAX_NUM_CPU_DEVICES={target.devices} in the environment, and call jax.make_mesh."
            ) from error
        raise
