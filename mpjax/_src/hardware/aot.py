"""Compiles functions for hardware that is not there."""

import contextlib
import dataclasses
import functools
import inspect
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.interpreters import mlir
from jax.sharding import NamedSharding, get_abstract_mesh, use_abstract_mesh

from mpjax._src import _jax
from mpjax._src.errors import CompileError, brief, check_callable
from mpjax._src.hardware.compiler import Compilers, Options, compilers, require
from mpjax._src.hardware.devices import traced_for
from mpjax._src.hardware.report import CompileReport, report_of
from mpjax._src.hardware.targets import Target, find_target
from mpjax._src.patterns import path_of

# What stands for this machine where a target may.
CPU = "cpu"

LONGEST = 1e6  # seconds; what the operating system can wait for has an end too


def compile_for(
    target: str,
    fun: Callable[..., Any],
    *args: Any,
    timeout: float = 600.0,
    compiler_options: Mapping[str, Any] | None = None,
) -> CompileReport:
    """Compiles a function for an accelerator that need not be there, and reports what it takes.

    XLA's real compiler for the target runs, in a process of its own; nothing executes, and JAX in
    this process is left as it is. Figures do not change from run to run, except with versions of
    JAX. Without a device nothing is autotuned: a real run may choose other kernels, with other
    scratch memory.

    Args:
        target: "v100", "t4", "a100-40", "a100-80", "a6000", "h100", "h200", "b200", "v4", "v5e",
            "v5p" or "v6e"; several of them as "h100 x 8" (GPUs in hosts of eight) or "v5e x 16"
            (a slice). Figures are then those of one device, and the report lists collectives.
        fun: A function, jitted or not. Jit it with ``donate_argnums`` as the real program does:
            results that cannot take the place of arguments need memory of their own.
        *args: Its arguments: arrays, numbers, `jax.ShapeDtypeStruct` (which need no memory), and
            pytrees of them. For one device it does not matter where they lie. For several they
            have a `jax.sharding.NamedSharding`; its mesh may be a `jax.sharding.AbstractMesh`,
            which needs no devices, or one of as many CPU devices (JAX_NUM_CPU_DEVICES).
        timeout: Seconds that the compiler may take.
        compiler_options: XLA's flags, such as ``{"xla_gpu_enable_triton_gemm": False}``, as
            `jax.jit` takes them; those of a jitted ``fun`` do not count here.

    Returns:
        A `CompileReport`.

    Raises:
        ImportError: If the target's compiler is not installed; it says what to install.
        CompileError: If the compiler refuses the program.
        OutOfMemoryError: If it refuses because the target's memory is too small. (TPU compilers do;
            for a GPU read `CompileReport.fits`.)
        TimeoutError: If it takes longer than ``timeout``.
        TypeError, ValueError: If an argument is not legal.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
        >>> report = mpjax.compile_for("v100", jnp.dot, x, x)  # doctest: +SKIP
        >>> report.matmul_dtypes  # doctest: +SKIP
        {'f32': 1}

        On eight devices, none of them here:

        >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
        >>> mesh = AbstractMesh((8,), ("data",))
        >>> x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("data")))
        >>> report = mpjax.compile_for("h100 x 8", jnp.sum, x)  # doctest: +SKIP
        >>> [(row.kind, row.dtype) for row in report.collectives]  # doctest: +SKIP
        [('all-reduce', 'f32')]
    """
    found = find_target(target)
    check_timeout(timeout)
    check_callable(fun, "fun")
    options = checked_options(compiler_options)
    require(found)
    program = lower(found, fun, args)
    with compilers(found) as child:
        return compile_program(child, found, program, timeout, options)


# ---- the parts, which largest_batch uses too -----------------------------------------------------


def check_timeout(timeout: float) -> None:
    legal = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not legal or not 0 < timeout <= LONGEST:
        raise ValueError(
            f"timeout={brief(timeout)} must be a number of seconds, more than 0 and at most "
            f"{LONGEST:g}."
        )


def checked_options(options: Any) -> Options:
    """Returns XLA's flags as a dictionary of their own."""
    legal = options is None or (
        isinstance(options, Mapping)
        and all(isinstance(name, str) and name.startswith("xla_") for name in options)
        and all(isinstance(value, bool | int | float | str) for value in options.values())
    )
    if not legal:
        raise ValueError(
            f"compiler_options={brief(options)} must be a dictionary of XLA's flags, by name and "
            "without dashes, such as {'xla_gpu_enable_triton_gemm': False}: values are bools, "
            "numbers and strings."
        )
    return dict(options or {})


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to be compiled: its StableHLO, and what must live until it is."""

    stablehlo: bytes
    lowered: Any


def lower(target: Target, fun: Callable[..., Any], args: Sequence[Any]) -> Program:
    """Lowers a function for a target, its arguments taken from any device."""
    abstract = jax.tree.map(functools.partial(_abstract, target.devices > 1), tuple(args))
    if not _is_jitted(fun):
        _check_args(fun, abstract)
    with _lowering_errors(target), _mesh_of(abstract):
        program, partitions = _stablehlo_for(target, fun, abstract)
    if partitions != target.devices:
        _tell_of_partitions(target, partitions)
    return program


def compile_program(
    child: Compilers, target: Target, program: Program, timeout: float, options: Options
) -> CompileReport:
    """Returns the report of a program that a child compiles."""
    answer = child.compile(target, program.stablehlo, timeout, options, _partition(target))
    return report_of(target, answer)


def compiled_texts(
    target: str, fun: Callable[..., Any], args: Sequence[Any], timeout: float = 600.0
) -> tuple[str, str, CompileReport | None]:
    """Returns a program's HLO, as a compiler was given it and as it left it, and the report.

    Args:
        target: As for `compile_for`, which has the report; or "cpu", which has none: this machine.
        fun: As for `compile_for`.
        args: Its arguments.
        timeout: Seconds that the compiler of an accelerator may take.
    """
    if target == CPU:
        lowered = jax.jit(fun).lower(*args)
        module: Any = lowered.compiler_ir("hlo")
        before = module.as_hlo_module().to_string()  # with signatures, which `as_text` leaves out
        return before, lowered.compile().as_text() or "", None
    found = find_target(target)
    require(found)
    program = lower(found, fun, args)
    with compilers(found) as child:
        answer = child.compile(found, program.stablehlo, timeout, {}, _partition(found))
    return answer["asked"], answer["hlo"], report_of(found, answer)


# ---- inside --------------------------------------------------------------------------------------


def _partition(target: Target) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns what answers a compiler that asks how a function of Python's is partitioned."""

    def partition(question: dict[str, Any]) -> dict[str, Any]:
        with traced_for(target.chip), _jax.as_if_on_gpu(target.capability):
            return _jax.answer_partitioning(question)

    return partition


def _is_jitted(fun: Any) -> bool:
    """Tells what `jax.jit` returned, which can be traced and lowered, from other functions."""
    return hasattr(fun, "trace") and hasattr(fun, "lower")


def _stablehlo_for(
    target: Target, fun: Callable[..., Any], args: Sequence[Any]
) -> tuple[Program, int]:
    """Returns a function's program for a target that need not be there, and its partitions.

    A function that is jitted already keeps its donation and its static arguments.
    """
    jitted: Any = fun if _is_jitted(fun) else jax.jit(fun)
    with traced_for(target.chip), _jax.as_if_on_gpu(target.capability):
        lowered = jitted.trace(*args).lower(lowering_platforms=(target.platform,))
        module = lowered.compiler_ir("stablehlo")
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    partitions = mlir.ir.IntegerAttr(module.operation.attributes["mhlo.num_partitions"]).value
    return Program(buffer.getvalue(), lowered), partitions


def _abstract(spread: bool, x: Any) -> Any:
    """Returns an array as its shape, and how it is spread over a mesh, if that counts."""
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        weak = bool(getattr(x, "weak_type", False))
        sharding = x.sharding if spread and isinstance(x.sharding, NamedSharding) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak, sharding=sharding)
    return x


def _mesh_of(args: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns the context of the arguments' mesh, which `reshard` and the like ask for.

    A mesh that is set already counts: it is what the program will run under.
    """
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    mesh = next((s.mesh.abstract_mesh for s in shardings if s is not None), None)
    if mesh is None or not get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return use_abstract_mesh(mesh)


def _tell_of_partitions(target: Target, partitions: int) -> NoReturn:
    spread = f"fun is sharded over {partitions} devices" if partitions > 1 else "fun is not sharded"
    if target.devices == 1:
        several = f"{target.name} x {partitions}"
        advice = f"Ask for target={several!r}, or leave out its shardings and constraints."
    elif partitions == 1:
        advice = (
            "Give arguments a jax.sharding.NamedSharding: its mesh may be a "
            f"jax.sharding.AbstractMesh(({target.devices},), ('data',)), which needs no devices."
        )
    else:
        advice = "The mesh and the target must have as many devices."
    count = "one" if target.devices == 1 else target.devices
    raise ValueError(f"{spread}, and target={target.name!r} has {count}. {advice}")


def _check_args(fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
    for keys, leaf in jax.tree_util.tree_leaves_with_path(args):
        legal = isinstance(leaf, jax.ShapeDtypeStruct | np.ndarray | np.generic | complex)
        if not legal and not isinstance(leaf, bool | int | float):
            raise TypeError(
                f"args[{path_of(keys)}]={brief(leaf)} is neither an array, a number nor a "
                "jax.ShapeDtypeStruct. What is not data belongs into the function "
                "(functools.partial, a closure), or jit it with static_argnums."
            )
    with contextlib.suppress(ValueError):  # of builtins nothing is known
        signature = inspect.signature(fun)
        try:
            signature.bind(*args)
        except TypeError as error:
            raise TypeError(
                f"args: {len(args)} were given, and fun{signature} cannot be called so: {error}. "
                "compile_for(target, fun, *args) takes what fun is called with."
            ) from None


@contextlib.contextmanager
def _lowering_errors(target: Target) -> Iterator[None]:
    """Words JAX's refusals to lower for a platform that is not there."""
    try:
        yield
    except (RuntimeError, ValueError, NotImplementedError) as error:
        text = str(error)
        if "different from the lowering platform" in text:
            raise CompileError(
                f"fun cannot be lowered for target={target.name!r}: it calls back into Python "
                "(jax.debug.print, pure_callback, io_callback), which needs a running device. "
                "Leave the callbacks out."
            ) from error
        if "require devices" in text:
            raise ValueError(
                f"fun cannot be lowered for target={target.name!r} over an AbstractMesh: it calls "
                "a function that Python partitions (custom_partitioning: cuDNN's attention, "
                "Transformer Engine), which asks for a mesh of devices. CPU devices will do: "
                f"JAX_NUM_CPU_DEVICES={target.devices} in the environment, and jax.make_mesh."
            ) from error
        raise
