"""Loops that end when what matmuls compute meets a tolerance: in half they might never do."""

import jax.numpy as jnp
import pytest
from jax import lax
from programs import W, X
from support import cast

import mpjax


def near(x):
    return jnp.max(jnp.abs(x)) < 1e-5


# name: what a turn hands on beside the state, by the last two states; when to stop; and whether
# that is because of a float32 comparison
VERDICTS = {
    "a flag": (lambda new, old, c: near(new - old), lambda c: c, True),
    "a number": (lambda new, old, c: jnp.where(near(new - old), 1, 0), lambda c: c == 1, True),
    "of several": (lambda new, old, c: c + near(new - old), lambda c: c >= 2, True),
    "a token": (lambda new, old, c: jnp.argmax(new), lambda c: c == 99, False),
    "a count": (lambda new, old, c: c + 1, lambda c: c > 5, False),
}


@pytest.mark.parametrize("name", VERDICTS)
@pytest.mark.parametrize("late", [False, True])
def test_a_verdict_that_the_body_finds_ends_a_loop_as_one_in_its_condition_does(name, late):
    found, ends, alone = VERDICTS[name]

    def solve(w, x):
        def turn(c):
            old, n, now, _ = c
            new = jnp.tanh(x @ w + old @ w) / 4
            return new, n + 1, jnp.asarray(found(new, old, now), now.dtype), now

        nothing = False if name == "a flag" else 0
        go = lambda c: ~ends(c[3 if late else 2]) & (c[1] < 50)  # noqa: E731
        return lax.while_loop(go, turn, (x, 0, nothing, nothing))[:2]

    rows = mpjax.explain(solve, "mixed_bfloat16")(W, X).rows
    (loop,) = [row for row in rows if row.primitive == "while"]
    assert ("ends this loop" in loop.reason) == alone
    if alone:
        assert cast(solve)(W, X)[1] == solve(W, X)[1]
