"""Old names that still work for a while, as data. See docs/release.md for the rule."""

import datetime
import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Deprecated(NamedTuple):
    """A public name that is going away."""

    instead: str  # where in `mpjax` the object is, such as "cast" or "optim.master_params"
    since: datetime.date  # the date of the first release that warned
    removal: datetime.date  # the first date on which a release may lack the name
    advice: str = ""  # what to write, if it is not ``instead``


# Names that were in `mpjax` itself, by the module that has them now.
SINCE, REMOVAL = datetime.date(2026, 11, 25), datetime.date(2027, 2, 25)
NOW_IN = {
    "checkpoint": """
        export_params load_safetensors save_safetensors
    """,
    "debug": """
        JsonLines WatchedStep flush_metrics gradient_histogram log_metrics measure_precision
        recommend_loss_scale tune warn_if_stalled
    """,
    "errors": """
        CompileError DivergenceError OutOfMemoryError PrecisionWarning
    """,
    "hardware": """
        device_report half_dtype largest_batch
    """,
    "optim": """
        EightBitMomentsState MasterWeightsState MixedPrecision MixedPrecisionState
        SkipNonfiniteState StochasticRoundingState master_params skip_nonfinite state_shardings
        stochastic_round with_8bit_moments with_kahan_summation with_master_weights
        with_stochastic_rounding
    """,
    "reports": """
        Agreement BatchTry CastReport CollectiveRow Comparison CompileReport DeviceFacts
        DeviceReport Finding GradientHistogram LargestBatch LintReport LossScaleAdvice MatmulRow
        MemoryRow NonfiniteReport Overflow Parting PrecisionReport PrecisionRow Risk Stalled Tuning
        Underflow WatchedTensor
    """,
}
# Names without a successor of the same kind: where they are for a while, and what to write.
GONE = {
    "TrainStep": (
        "_src.training.step.TrainStep",
        "init, step = mpjax.build_train_step(...)",
    ),
    "full_precision": ("_src.autocast.regions.full_precision", 'mpjax.precision("float32")'),
    "get_loss_scale": (
        "_src.training.loss_scale.get_loss_scale",
        'loss_scale="auto", or mpjax.DynamicLossScale() in your own loop,',
    ),
    "plot_agreement": ("reports.Agreement.plot", "report.plot(path)"),
    "plot_compare": ("reports.Comparison.plot", "report.plot(path)"),
    "plot_gradient_histogram": ("reports.GradientHistogram.plot", "histogram.plot(path)"),
    "plot_precision": (
        "_src.document.plots.plot_precision",
        "reports[-1].plot(path, earlier=reports[:-1])",
    ),
}
# Old name -> what replaces it, and until when it works: at least three months.
DEPRECATED: dict[str, Deprecated] = {
    **{
        name: Deprecated(f"{module}.{name}", SINCE, REMOVAL)
        for module, names in NOW_IN.items()
        for name in names.split()
    },
    **{name: Deprecated(place, SINCE, REMOVAL, say) for name, (place, say) in GONE.items()},
}


# Old place of a module -> its place now. Pickles name the modules of their classes.
MOVED = {
    "mpjax._src.autocast.explain": "mpjax._src.instruments.explain",
    "mpjax._src.autocast.residuals": "mpjax._src.instruments.kept",
    "mpjax._src.errors": "mpjax._src.base.errors",
}


class Moved(importlib.abc.Loader):
    """Finds the modules of `MOVED` at their old places, and says what replaces absent ones."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith("mpjax.") and name not in MOVED:  # no module: `mpjax.amp`, say
            from mpjax._src.base.absent import hint_for

            hint = hint_for(*name.rpartition(".")[::2])
            if hint:
                raise ModuleNotFoundError(f"No module named {name!r}.{hint}", name=name)
        return importlib.machinery.ModuleSpec(name, self) if name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(MOVED[module.__name__])


sys.meta_path.append(Moved())


def warn_of(old: str, advice: str, removal: datetime.date, stacklevel: int = 3) -> None:
    """Warns of an old way to write something, in the caller's caller."""
    message = f"{old} is deprecated, and may be removed from {removal} on. Use {advice} instead."
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


def deprecated(advice: str) -> Callable[[F], F]:
    """Returns a decorator of a method that went away with the names above."""

    def decorate(fun: F) -> F:
        @functools.wraps(fun)
        def old(*args, **kwargs):
            warn_of(fun.__qualname__, advice, REMOVAL)
            return fun(*args, **kwargs)

        return old  # type: ignore[return-value]

    return decorate


def resolve(name: str) -> str:
    """Returns where in `mpjax` a name is; warns if it is an old one."""
    row = DEPRECATED.get(name)
    if row is None:
        return name
    # `from mpjax import name` first asks whether the name is there, and then asks for it.
    if sys._getframe(2).f_code.co_name != "_handle_fromlist":
        advice = row.advice or f"mpjax.{row.instead}"
        warn_of(f"mpjax.{name}", advice, row.removal, stacklevel=4)
    return row.instead
