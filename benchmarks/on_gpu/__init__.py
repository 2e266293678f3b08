"""The parts of the suite `benchmarks.gpu`, and the modules that they share.

    speed                       training steps timed in pairs, each rival in its own process
    jax_rivals, torch_rivals, torch_models
                                the steps that are timed
    worker, children            the functions that run in the processes, and the processes
    statistics, flops, energy   ratios, FLOPs and joules
    memory                      the memory that compile_for predicts beside that of the device
    quality                     half's losses beside the spread of float32's seeds
    repository_tests            the repository's own tests on the device
    goals, tables               the goals, and the printed tables

Nothing here imports JAX or PyTorch before a worker has set the environment variables that they read
when they are imported.
"""
