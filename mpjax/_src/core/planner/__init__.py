"""Programs that see their own derivative: what is kept for it, and what is rounded.

JAX differentiates the float32 program. The forward and the backward part are one list of equations,
which a minimum cut divides; casts are written last.
"""
