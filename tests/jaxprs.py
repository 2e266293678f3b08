"""Looking into jaxprs, for tests."""

import jax


def equations(jaxpr):
    """Yields every equation of a jaxpr and of the jaxprs inside it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        is_jaxpr = lambda node: hasattr(node, "eqns")  # noqa: E731
        for sub in jax.tree.leaves(eqn.params, is_leaf=is_jaxpr):
            if is_jaxpr(sub) or hasattr(sub, "jaxpr"):
                yield from equations(sub)


def matmul_dtypes(fun, *args):
    """Returns the operand dtypes of every matmul and convolution of a function."""
    return [
        tuple(var.aval.dtype.name for var in eqn.invars[:2])
        for eqn in equations(jax.make_jaxpr(fun)(*args))
        if eqn.primitive.name in ("dot_general", "conv_general_dilated")
    ]
