"""The cases of suite "cpu": what is timed (`steps`, `overhead`, `dispatch`, `tracing`, `reports`,
`instruments`, `underflow`, `quality`, `dots`), on what (`tasks`), how (`paired`), beside what else
ran (`others`), and what is to be reached (`goals`).

``CASE(smoke)`` yields names of rows, and functions that measure them.
"""
