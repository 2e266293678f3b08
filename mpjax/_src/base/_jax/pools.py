"""From which value the gradients of max pools in autocast's programs are summed: -0.0, on GPUs.

The transpose of a max pool adds to zeros. For XLA, all zeros of one dtype and shape are one array.
If elementwise operations read such zeros as well, as those of a relu do (``max(x, 0)``, ``x > 0``,
``select(.., 0)``), XLA:GPU writes the array in the forward pass, keeps it until the backward pass
adds to it, and copies it then. The relu is computed where the zeros are written, and not in its
readers. The neutral element of addition is -0.0, and an array of it is another one, which is made
where it is needed.

TPU compilers share no zeros; for them, and for pools that are not marked, JAX's lowering is used.
"""

from typing import Any

import jax
import numpy as np
from jax._src.lax import lax, windowed_reductions
from jax.interpreters import mlir

from mpjax._src.base._jax.barriers import GPUS
from mpjax._src.base._jax.cpu_matmuls import is_marked

_scatter_p = windowed_reductions.select_and_scatter_add_p


def _lowering(own: Any) -> Any:
    """Returns the lowering rule of the transpose of a max pool, given JAX's own."""
    from_neutral = mlir.lower_fun(_scatter, multiple_results=False)

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        floats = jax.dtypes.issubdtype(ctx.avals_out[0].dtype, np.floating)
        return (from_neutral if is_marked(ctx) and floats else own)(ctx, *operands, **params)

    return lower


def _scatter(
    source: Any,
    operand: Any,
    *,
    select_prim: Any,
    window_dimensions: Any,
    window_strides: Any,
    padding: Any,
) -> Any:
    """Adds each entry of ``source`` to -0.0 at the entry that its window selects in ``operand``.

    As in JAX's rule for GPUs, the operand is padded before, not by its windows.
    """
    identity = lax._get_max_identity if select_prim is jax.lax.ge_p else lax._get_min_identity
    outside = identity(operand.dtype)
    out = windowed_reductions._select_and_scatter(
        jax.lax.pad(operand, outside, [(low, high, 0) for low, high in padding]),
        select_prim.bind,
        window_dimensions,
        window_strides,
        [(0, 0)] * len(padding),
        source,
        jax.lax.full_like(outside, -0.0),
        jax.lax.add,
    )
    starts = [low for low, _ in padding]
    return jax.lax.slice(out, starts, np.add(starts, operand.shape))


for _platform in GPUS:
    _OWN = mlir._platform_specific_lowerings[_platform][_scatter_p].rule
    mlir.register_lowering(_scatter_p, _lowering(_OWN), platform=_platform)
