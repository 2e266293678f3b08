"""The only file that reaches into JAX's internals, or knows how its versions differ."""

from jax._src.interpreters import ad, mlir


def primitive_names() -> frozenset[str]:
    """Returns the names of every primitive that JAX can lower or differentiate."""
    tables = (mlir._lowerings, ad.primitive_jvps, ad.primitive_transposes)
    return frozenset(primitive.name for table in tables for primitive in table)
