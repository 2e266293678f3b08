"""Recursions whose derivatives are exponential, or jump, in differences of large values.

Each program is a function of a dict of parameters and of data, and returns a mean. Its gradient is
judged with float64: it may be a few times as far off as with operands of matmuls rounded by hand.
"""

import functools

import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax import lax
from support import normal

import mpjax

STORAGES = ("fast", "lean", "0.5", "8bit")
TURNS, ROWS, STATES, WIDTH = 40, 4, 6, 12
LARGE = 3.0  # by which emissions are scaled, so that values become large
X = normal(0, TURNS, ROWS, WIDTH)
P = {
    "w": normal(1, WIDTH, STATES, scale=0.4),
    "t": normal(2, STATES, STATES),
    "v": normal(3, STATES, WIDTH, scale=0.4),
}
LABELS = np.arange(TURNS * ROWS).reshape(TURNS, ROWS) % STATES
lse = jax.nn.logsumexp
PROGRAMS = {}


def program(fun):
    PROGRAMS[fun.__name__] = fun
    return fun


def emissions(p, x):
    return jax.nn.log_softmax(x @ p["w"]) * LARGE


def move(a, t):
    return lse(a[..., :, None] + t, -2)


def move_by_hand(a, t):
    s = a[..., :, None] + t
    m = jnp.max(s, -2)
    return m + jnp.log(jnp.sum(jnp.exp(s - m[..., None, :]), -2))


def ended(a):
    return -jnp.mean(lse(a, -1)) / TURNS


def forward(step):
    def fun(p, x):
        e = emissions(p, x)
        return ended(lax.scan(lambda a, e: (step(a, e, p), None), e[0], e[1:])[0])

    return fun


PROGRAMS["hmm"] = forward(lambda a, e, p: move(a, jax.nn.log_softmax(p["t"])) + e)
PROGRAMS["hmm_by_hand"] = forward(lambda a, e, p: move_by_hand(a, jax.nn.log_softmax(p["t"])) + e)
PROGRAMS["hmm_of_checkpoints"] = forward(
    jax.checkpoint(lambda a, e, p: move(a, jax.nn.log_softmax(p["t"])) + e)
)
PROGRAMS["crf"] = forward(lambda a, e, p: move(a, 2 * p["t"]) + e)
PROGRAMS["soft_viterbi"] = forward(lambda a, e, p: move(4 * a, 4 * p["t"]) / 4 + e)
PROGRAMS["viterbi"] = forward(lambda a, e, p: jnp.max(a[..., :, None] + p["t"], -2) + e)
PROGRAMS["neighbors"] = forward(
    lambda a, e, p: jnp.logaddexp(a, jnp.roll(a, 1, -1) + p["t"][0]) + e
)
PROGRAMS["stacked"] = forward(lambda a, e, p: lse(jnp.stack([a, a[:, ::-1] + p["t"][0]]), 0) + e)
PROGRAMS["sorted"] = forward(lambda a, e, p: jnp.sort(a, -1) * (1 + 0.01 * p["t"][0]) + e)
PROGRAMS["thresholds"] = forward(
    lambda a, e, p: jnp.where(a > a.mean(-1, keepdims=True), a + p["t"][0], a - 1) + e
)


PROGRAMS["ratings"] = forward(
    lambda a, e, p: a + jax.nn.sigmoid(a - jnp.roll(a, 1, -1) + p["t"][0]) + 40 * jnp.abs(e)
)


@program
def hmm_with_all_states(p, x):
    e, t = emissions(p, x), jax.nn.log_softmax(p["t"])
    step = lambda a, e: (move(a, t) + e,) * 2  # noqa: E731
    a = jnp.concatenate([e[:1], lax.scan(step, e[0], e[1:])[1]])
    back = lambda b, e: (lse(t + (b + e)[..., None, :], -1),) * 2  # noqa: E731
    b = lax.scan(back, jnp.zeros((ROWS, STATES)), e[1:], reverse=True)[1]
    posterior = jax.nn.softmax(a[:-1] + b)
    return jnp.mean((posterior @ p["v"] - x[:-1]) ** 2)


@program
def hmm_unrolled(p, x):
    e, t = emissions(p, x), jax.nn.log_softmax(p["t"])
    a = e[0]
    for i in range(1, 24):
        a = move(a, t) + e[i]
    return ended(a)


@program
def hmm_by_fori(p, x):
    e, t = emissions(p, x), jax.nn.log_softmax(p["t"])
    return ended(lax.fori_loop(1, TURNS, lambda i, a: move(a, t) + e[i], e[0]))


@program
def hmm_in_scans(p, x):
    e, t = emissions(p, x), jax.nn.log_softmax(p["t"])
    inner = lambda a, e: (move(a, t) + e, None)  # noqa: E731
    outer = lambda a, e: (lax.scan(inner, a, e)[0], None)  # noqa: E731
    return ended(lax.scan(outer, e[0], e.reshape(5, -1, ROWS, STATES))[0])


@program
def log_matrices(p, x):
    m = emissions(p, x)[:, :, None] + jax.nn.log_softmax(p["t"])
    product = lambda a, b: lse(a[..., :, :, None] + b[..., None, :, :], -2)  # noqa: E731
    return ended(lax.associative_scan(product, m)[-1])


@program
def crf_with_labels(p, x):
    e, t = x @ p["w"] * LARGE, p["t"]
    score = jnp.take_along_axis(e, LABELS[..., None], -1).sum() + t[LABELS[:-1], LABELS[1:]].sum()
    a = lax.scan(lambda a, e: (move(a, t) + e, None), e[0], e[1:])[0]
    return (jnp.sum(lse(a, -1)) - score) / x.size


@program
def ctc(p, x):
    e = emissions(p, x)[..., [0, 1, 0, 2, 0, 3, 0]]
    skips = jnp.array([0.0, 0, 0, 1, 0, 1, 0]) > 0

    def shifted(a, by):
        return jnp.pad(a, ((0, 0), (by, 0)), constant_values=-1e5)[:, :-by]

    def step(a, e):
        ways = [a, shifted(a, 1), jnp.where(skips, shifted(a, 2), -1e5)]
        return lse(jnp.stack(ways), 0) + e, None

    start = jnp.where(jnp.arange(7) < 2, e[0], -1e5)
    return ended(lax.scan(step, start, e[1:])[0][:, -2:])


@program
def transducer(p, x):
    blank = jax.nn.log_softmax(x[:10] @ p["w"]) * LARGE
    emit = jax.nn.log_softmax(jnp.tanh(x[:10] @ p["w"]) @ p["t"]) * LARGE

    def row(a, both):
        blank, emit = both

        def cell(left, of):
            above, blank, emit = of
            now = jnp.logaddexp(above + blank, left + emit)
            return now, now

        first = a[:, 0] + blank[:, 0]
        rest = lax.scan(cell, first, (a[:, 1:].T, blank[:, 1:].T, emit[:, 1:].T))[1]
        return jnp.concatenate([first[None], rest]).T, None

    start = jnp.cumsum(emit[0], -1)
    return -jnp.mean(lax.scan(row, start, (blank, emit))[0][:, -1])


@program
def sinkhorn(p, x):
    cost = jnp.sum((x[0][:, None] @ p["w"] - (x[1] @ p["w"])[None]) ** 2, -1) * 20

    def step(fg, _):
        f, g = fg
        f = -lse(g[None] - cost, 1)
        return (f, -lse(f[:, None] - cost, 0)), None

    f, g = lax.scan(step, (jnp.zeros(ROWS), jnp.zeros(ROWS)), None, length=20)[0]
    return jnp.mean(jnp.exp(f[:, None] + g[None] - cost) * cost)


@program
def sinkhorn_unrolled(p, x):
    cost = ((x[0] @ p["w"])[:, None] - (x[1] @ p["w"])[None]) ** 2
    cost, f, g = jnp.sum(cost, -1) * 20, jnp.zeros(ROWS), jnp.zeros(ROWS)
    for _ in range(10):
        f = -lse(g[None] - cost, 1)
        g = -lse(f[:, None] - cost, 0)
    return jnp.mean(jnp.exp(f[:, None] + g[None] - cost) * cost)


@program
def particles(p, x):
    def step(carry, x):
        z, logw = carry
        z = jnp.tanh(z @ p["t"] / 3) + x @ p["w"]
        logw = logw - jnp.sum((z - 0.3) ** 2, -1) * LARGE
        return (z, logw), lse(logw, 0)

    (z, logw), ys = lax.scan(step, (jnp.zeros((ROWS, STATES)), jnp.zeros(ROWS)), x)
    return jnp.mean(jax.nn.softmax(logw) @ z) - ys[-1] / TURNS


@program
def time_warping(p, x):
    y = x[:12] @ p["w"]
    cost = jnp.sum((y[:, None, 0] - y[None, :, 1]) ** 2, -1) * LARGE

    def cell(left, of):
        above, corner, cost = of
        now = cost - lse(-jnp.stack([left, above, corner]) / 0.3, 0) * 0.3
        return now, now

    def row(a, cost):
        corner = jnp.concatenate([jnp.full(1, 100.0), a[:-1]])
        return lax.scan(cell, jnp.float32(100), (a, corner, cost))[1], None

    return lax.scan(row, jnp.cumsum(cost[0]), cost[1:])[0][-1] / 12


@program
def phases(p, x):
    turn = lambda a, e: (a + 4 + e, jnp.sin(a))  # noqa: E731
    start = jnp.zeros((ROWS, STATES))
    return jnp.mean((lax.scan(turn, start, x @ p["w"])[1] @ p["v"]) ** 2)


@program
def running_sums(p, x):
    a = lax.cumlogsumexp(emissions(p, x) * jnp.arange(TURNS, dtype=jnp.float32)[:, None, None])
    return jnp.mean(jnp.exp(a - lax.stop_gradient(a) - 1) * a) / TURNS


@program
def survival(p, x):
    hazard = -jax.nn.softplus(x @ p["w"])
    logs = jnp.cumsum(hazard, 0) + jnp.cumsum(hazard[::-1], 0) * p["t"][0]
    return jnp.mean(jnp.exp(logs - lax.stop_gradient(logs.max(0))) @ p["v"])


# ---- judged -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def yardstick(name, half, seed=0):
    """Returns the arguments, the gradient in float64, and those of rounded matmuls."""
    fun, args = PROGRAMS[name], measure.redrawn((P, X), seed)
    program = measure.traced(jax.grad(fun), args)
    truth = measure._runner(program, measure._in_float64)(args)
    rounding = functools.partial(measure._rounding, jnp.dtype(half))
    ways = (functools.partial(rounding, results=results) for results in (False, True))
    return args, truth, [measure._runner(program, way)(args) for way in ways]


def report(name, half, storage):
    """Returns the errors of the gradient, of each parameter."""
    args, truth, hand = yardstick(name, half)
    fun = mpjax.autocast(PROGRAMS[name], f"mixed_{half},storage={storage}")
    got = jax.jit(jax.grad(fun), compiler_options=measure.options())(*args)
    got = jax.tree.map(lambda x: np.asarray(x, np.float64), got)
    return measure._rows("gradient", half, truth, *hand, got)
