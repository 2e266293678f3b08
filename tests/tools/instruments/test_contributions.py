import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._src.core.base.contexts import constants_as_casts
from mpjax._src.core.planner import rounding
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.tools.instruments.contributions import Measure, Runner, lengths
from mpjax._src.tools.instruments.programs import make_program
from tests.helpers.support import normal


def test_squares_of_terms_estimate_unless_the_square_of_the_sum_contradicts_them():
    sums, squares = np.ones((8, 4)), np.array([[0.9, 0.5, 0.0, 4.0]] * 8)
    # By 8 probes the square of a sum has a standard error of half of it: more is a contradiction.
    got = lengths(sums, squares) ** 2
    np.testing.assert_allclose(got[[0, 2]], [0.9, 1.0])
    assert 0.5 < got[1] < 1 and 1 < got[3] < 4
    # By more probes what differs is the bias of the terms.
    sums, squares = np.ones((12800, 3)), np.array([[0.5, 0.99, 1.7]] * 12800)
    np.testing.assert_allclose(lengths(sums, squares) ** 2, [1.0, 0.99, 1.0], rtol=2e-3)


@pytest.mark.parametrize("probes", [4, 16])
def test_estimates_of_independent_roundings_hardly_depend_on_the_signs(probes, monkeypatch):
    """One product's result: thousands of roundings."""
    monkeypatch.setattr(rounding, "SMALL", 1)

    def loss(w, x):
        return jnp.mean(jnp.sin(jax.nn.tanh(x @ w["a"]) @ w["b"]))

    w = {"a": normal(0, 64, 64, scale=0.1), "b": normal(1, 64, 64, scale=0.1)}
    with constants_as_casts():
        policy = get_policy("mixed_bfloat16")
        program = make_program("explain", loss, policy, (w, normal(2, 64, 64)), {}, 0, False)
    runner = Runner(program, 1.0, probes)
    weights = [
        [float(n == "loss") for n in runner.names],
        [float(n != "loss") for n in runner.names],
    ]
    measure = Measure(runner, *weights)
    sums, squares = runner.derived(np.array(weights) / measure.sizes[:, None])[:, 1:]
    exact = np.array([measure.pair(row).gradient for row in np.eye(len(runner.entries))])
    by_squares, by_sums = (np.sqrt(x.mean(0)) / exact for x in (squares, sums**2))
    assert len(exact) > 6
    assert np.abs(np.log(by_squares)).mean() < 0.15
    assert np.abs(np.log(by_squares)).mean() < np.abs(np.log(by_sums)).mean()
