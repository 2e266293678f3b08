"""When Python looks for garbage."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collected_later() -> Iterator[None]:
    """Leaves garbage to a later collection, while many objects are made of which most stay.

    Python would go through all objects of the process again and again, for it to find nothing.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Who has switched collections off must not find them on afterwards.
        if before:
            gc.enable()
