"""Context variables that functions can read while JAX traces them. JAX's caches depend on them.

They are created when both mpjax and JAX are imported (`lazy`), before anything is traced. A context
variable that is created later changes the cache key of every program, so JAX would compile each of
them again.
"""

import contextlib
import contextvars
from typing import Self

import jax
import jax.extend.core  # creates context variables too on JAX 0.12; all of mpjax imports it

# The autocast around the traced function, as an `autocast.kernels.Tracing`, or None.
PLANNED_FOR = jax.make_user_context(default_value=None)

# The name of the target that a function is compiled for, or "" for the default device.
COMPILED_FOR = jax.make_user_context(default_value="")

# Whether a function is traced for the linter. The trace then includes the casts of Python numbers.
LINTED = jax.make_user_context(default_value=False)

# What is put around the functions that a script differentiates, a `scripts.hooks.Hook`, or None.
HOOKED = jax.make_user_context(default_value=None)

# Whether constants are rounded where the program runs, so that a report can measure the error.
CONSTANTS_AS_CASTS = jax.make_user_context(default_value=False)


def constants_as_casts() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which constants are rounded where the program runs.

    It is a function because cloudpickle cannot store the variable, in what reads it.
    """
    return CONSTANTS_AS_CASTS(True)


# Whether a report runs: it says itself what it finds, so nothing warns of it.
IN_REPORT = contextvars.ContextVar("in_report", default=False)


class unchecked(contextlib.ExitStack, contextlib.ContextDecorator):
    """Lets NaN, Inf and unscaled gradients pass in the programs that a report runs.

    It is a decorator too, whose functions cloudpickle stores: a generator could not be.
    """

    def __enter__(self) -> Self:
        self.callback(IN_REPORT.reset, IN_REPORT.set(True))
        self.enter_context(jax.debug_nans(False))
        self.enter_context(jax.debug_infs(False))
        return self

    def _recreate_cm(self) -> Self:  # of each call of a decorated function
        return type(self)()
