"""What ``mpjax`` and ``python -m mpjax`` run: the command, or what is missing for it."""

import importlib.util
import sys
from collections.abc import Sequence

NEEDED = ("click", "rich")  # of the extra `cli`


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line, and exits."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        are = f"{' and '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed"
        print(f"Error: the mpjax command needs {are}: pip install 'mpjax[cli]'.", file=sys.stderr)
        sys.exit(2)
    from mpjax._src.tools.cli.commands import main

    main(argv)
