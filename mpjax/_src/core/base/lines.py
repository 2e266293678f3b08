"""Lines of source files: how "file:line" is shown, and whose files are a library's."""

import os
import re
import sys
import sysconfig
from pathlib import Path

PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
LIBRARIES = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))


def is_library(file: str) -> bool:
    """Returns whether a file belongs to an installed package or to Python, not to the user."""
    return file.startswith(("<frozen", *LIBRARIES)) or bool(PACKAGES.match(file))


def short(source: str) -> str:
    """Returns "file:line" with a path relative to the current directory or to site-packages.

    A cell of a notebook is "In[3]:line", as in IPython's own tracebacks.
    """
    file, colon, line = source.rpartition(":")
    if PACKAGES.match(file):
        return PACKAGES.sub("", file) + colon + line
    return (_cell(file) or _relative(file) or Path(file).name) + colon + line


def where(source: str, library: str = "") -> str:
    """Returns the user's line, and in brackets the library's line that it called."""
    return f"{short(source)} ({short(library)})" if library else short(source)


def _cell(file: str) -> str:
    """Returns the cell of a notebook that IPython compiled under the name of a file, or ""."""
    # Nothing ran in a notebook if IPython was not imported, so it is not imported for this.
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    named = shell and shell.compile.format_code_name(file)
    return named[1] if named else ""


def _relative(file: str) -> str:
    """Returns a path relative to the current directory, or "" if it is elsewhere."""
    try:
        return str(Path(file).relative_to(os.getcwd()))
    except (ValueError, OSError):  # elsewhere, or the current directory was deleted
        return ""
