"""What is told to functions while JAX traces them; its caches know of it.

Imported with mpjax, before anything is traced: a context that is made later, within a first call,
changes the key of every program, and each would be compiled again.
"""

import jax
import jax.extend.core  # on JAX 0.12 it makes contexts too, and all of mpjax imports it

# What a function is traced for that will be planned: an `autocast.kernels.Tracing`, or None.
PLANNED_FOR = jax.make_user_context(default_value=None)

# The name of what a function is compiled for, if that is not the device at hand.
COMPILED_FOR = jax.make_user_context(default_value="")

# Whether a function is traced for the linter: the casts of numbers are in what is traced then.
LINTED = jax.make_user_context(default_value=False)
