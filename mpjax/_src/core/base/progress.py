"""Progress of the instruments that take long: a bar of tqdm on a terminal, and nothing elsewhere.

An instrument opens a bar; what it calls, however deep, advances it. tqdm is imported with the first
bar that is shown.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator

_SHOWN = threading.local()  # the innermost bar of this thread, as `bar`


@contextlib.contextmanager
def progress_bar(progress: bool, title: str, unit: str, total: int | None = None) -> Iterator[None]:
    """Shows a bar on stderr while an instrument runs, if ``progress`` and stderr is a terminal.

    ``unit`` is what `advance` counts, in the singular, ``total`` how many of them there are, if
    known.
    """
    if not (progress and sys.stderr is not None and sys.stderr.isatty()):
        yield
        return
    try:
        from tqdm import tqdm
    except ImportError:  # of the extra `cli`, which no result needs
        yield
        return

    # An instrument may call another one that has its own bar.
    before = getattr(_SHOWN, "bar", None)
    # Without a total, tqdm's own form is a rate.
    form = None if total else "{desc}: {n_fmt}{unit} [{elapsed}{postfix}]"
    with tqdm(total=total, desc=title, unit=f" {unit}", leave=False, bar_format=form) as bar:
        _SHOWN.bar = bar
        try:
            yield
        finally:
            _SHOWN.bar = before


def advance(unit: str, what: str = "", by: int = 1) -> None:
    """Counts one more ``unit`` on the bar that counts them, and says what is done now."""
    bar = getattr(_SHOWN, "bar", None)
    if bar is not None and bar.unit == f" {unit}":
        bar.update(by)
        if what:
            bar.set_postfix_str(what)


def still_running() -> None:
    """Shows the elapsed time on the bar."""
    bar = getattr(_SHOWN, "bar", None)
    if bar is not None:
        bar.refresh()
