"""The parts of the suite `benchmarks.gpu`, and what they are made of.

    speed             training steps timed in pairs, each rival in a process of its own
      jax_rivals, torch_rivals, torch_models     what is timed
      worker, children                           where it runs
      statistics, flops, energy                  figures made of times
    memory            what compile_for predicts beside what a device takes
    quality           half's losses beside the spread of float32's seeds
    repository_tests  the repository's own tests on the device
    goals, tables     what is to be reached, and what is printed

Nothing here imports JAX or PyTorch before a worker has set what they read when they are imported.
"""
