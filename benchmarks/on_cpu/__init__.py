"""The cases of suite "cpu", and the modules that they share.

The cases are in `steps`, `overhead`, `gates`, `dispatch`, `tracing`, `reports`, `instruments`,
`checkpoints`, `underflow`, `codes`, `searches`, `quality`, `dots` and `inference`. `tasks` holds
the training tasks, `searching` the searches of others, `paired` the timing in pairs, `others` the
load of other processes, and `goals` the goals.

``case(smoke)`` of a module yields the names of rows with the functions that measure them.
"""
