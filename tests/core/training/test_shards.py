"""The norm of gradients, of all shards; `test_step_shards` has whole steps."""

import jax
import numpy as np
import optax
from support import normal

from mpjax._src.core.training.replicas import Shards


def test_the_norm_adds_squares_of_small_arrays_of_one_type_before_it_sums():
    """So that XLA:GPU runs few kernels. It is non-finite if any array is."""
    small = {str(i): normal(i, 3, 5) for i in range(8)}
    tree = small | {"other": normal(8, 5), "large": normal(9, 2, 2**17), "number": np.float32(2)}
    tree["complex"] = normal(10, 3, 5) + 1j * normal(11, 3, 5)
    norm = Shards((), (), True).norm
    run = jax.jit(norm)
    np.testing.assert_allclose(run(tree), optax.tree.norm(tree), rtol=1e-6)
    sums = [e for e in jax.make_jaxpr(norm)(tree).eqns if e.primitive.name == "reduce_sum"]
    assert sorted(e.invars[0].aval.shape for e in sums if e.params["axes"]) == sorted(
        [(3, 5), (5,), (2, 2**17), (3, 5)]
    )
    for name in tree:
        bad = np.array(tree[name])
        bad.flat[-1] = np.nan
        assert not np.isfinite(run(tree | {name: bad})), name


def test_the_norm_of_nothing_is_zero():
    assert Shards((), (), True).norm({}) == 0
