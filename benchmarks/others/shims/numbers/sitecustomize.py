"""Writes each value that a script reads from an array of JAX to the file in OTHERS_NUMBERS.

Python imports this module at its start if its folder is on the path. Scripts print few digits, or
none; what they read is each loss and metric in full. A line has a number in hexadecimal digits, or
the hash of an array: lines that two runs share, in any order, are bits that they share.
"""

import hashlib
import importlib.abc
import importlib.util
import os
import sys
import threading

MODULE = "jax._src.array"  # where the class of arrays gets its methods


class Finder(importlib.abc.MetaPathFinder):
    """Changes the class of arrays as soon as JAX has defined it."""

    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            # Open for as long as the process lives.
            out = open(os.environ["OTHERS_NUMBERS"], "a", buffering=1)  # noqa: SIM115
            watch(module.ArrayImpl, out)

        spec.loader.exec_module = exec_module
        return spec


def watch(kind, out):
    """Writes what is read of arrays of this class."""
    value, busy = kind._value, set()
    buffer = getattr(kind, "__buffer__", None)  # Python 3.12 and newer

    def tell(array, read):
        here = threading.get_ident(), id(array)  # several threads may read it
        if here in busy:
            return read()
        busy.add(here)
        try:
            found = value.fget(array)
        finally:
            busy.discard(here)
        if found.size == 1 and found.dtype.kind == "f":
            print(float(found.reshape(())).hex(), file=out)
        else:
            print(found.dtype, found.shape, hashlib.sha256(found.tobytes()).hexdigest(), file=out)
        return read()

    kind._value = property(lambda self: tell(self, lambda: value.fget(self)))
    if buffer is not None:
        kind.__buffer__ = lambda self, flags: tell(self, lambda: buffer(self, flags))


if os.environ.get("OTHERS_NUMBERS"):
    sys.meta_path.insert(0, Finder())
