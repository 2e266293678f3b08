"""Paths of checkpoints: which are refused, and the form in which orbax gets them.

Only this module imports etils, which orbax uses for paths, because it reads storage buckets too.
"""

import contextlib
import functools
import glob
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpjax._src.checkpoint.packages import needed
from mpjax._src.core.base.errors import CheckpointError, brief, misplaced

# What orbax appends to the name of a directory that it has not finished. A Manager removes such
# directories when it starts.
UNFINISHED = ".orbax-checkpoint-tmp"
# Storage buckets that orbax and tensorstore both know.
BUCKETS = "gs://", "s3://"
# Local directories that etils takes for buckets.
MISREAD = "/gs/", "/s3/", "/az/", "/hf/"


def absolute(path: str | os.PathLike, argument: str = "directory") -> str:
    """Returns an absolute path, which orbax needs; addresses such as gs:// are not changed.

    Raises:
        TypeError: If it is not a path.
        ValueError: If a checkpoint could not be written to it, or would be written elsewhere.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        numbered = " Manager(directory).save(number, state) numbers checkpoints."
        raise TypeError(
            f"{argument}={brief(path)} must be a path: a string or a pathlib.Path."
            f"{misplaced(path)}" + numbered * (argument == "directory")
        )
    wrong = _refused(text)
    if wrong:
        raise ValueError(f"{argument}={brief(path)} {wrong}")
    if is_remote(text):
        return text
    local = Path(text)
    # tensorstore refuses "..".
    return str(local.resolve() if ".." in local.parts else local.absolute())


def _refused(text: str) -> str | None:
    """Returns why nothing can be written to a path."""
    if not text:
        return "is empty. Use '.' for the working directory."
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode, so the arrays could not be stored. Choose another name."
    if "\0" in text or "\\" in text.replace(os.sep, "/"):
        return r"contains '\0' or '\\', which cannot be stored. Choose another name."
    if "://" in text and not text.startswith(BUCKETS):
        return f"is not an address that can be written to. Valid: a path, {', '.join(BUCKETS)}."
    if re.match(r"[A-Za-z]\w+:/(?!/)", text) or re.search("/gs:(/|$)", text):
        return "lost a '/': pathlib changes addresses. Pass the address as a string."
    if f"{Path(text).absolute()}/".startswith(MISREAD):
        return (
            "would be taken for the address of a storage bucket. Pass that address, or a directory "
            f"that is not below {', '.join(MISREAD)}."
        )
    return None


def is_remote(path: str) -> bool:
    """Returns whether an absolute path is the address of a storage bucket."""
    return path.startswith(BUCKETS)


def for_orbax(path: str | os.PathLike) -> Any:
    """Returns a path in the form that orbax takes."""
    text = absolute(path)
    return needed("etils.epath").Path(text) if is_remote(text) else _local()(text)


def reason(error: Exception) -> str:
    """Returns why something could not be written or read, in one line."""
    number = getattr(error, "errno", None)
    # As tensorstore and safetensors write it.
    if match := re.search(r"os_error_code='(\d+)'|os error (\d+)", str(error)):
        number = int(match[1] or match[2])
    if number:
        return os.strerror(number)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


@contextlib.contextmanager
def worded(before: str, after: str = "", *, cause: bool = True) -> Iterator[None]:
    """Raises a CheckpointError of one line in place of what orbax, tensorstore and others raise.

    Without its ``cause``, the traceback of another error is not shown.
    """
    try:
        yield
    # These have words of their own.
    except (CheckpointError, ImportError):
        raise
    except Exception as error:
        text = f"{before}{reason(error)}{after}"
        raise CheckpointError(text) from (error if cause else None)


@functools.cache
def _local() -> Any:
    """Returns the class of local paths, which orbax passes on and derives others from."""

    class Local(type(needed("etils.epath").Path("/"))):  # type: ignore[misc]
        def glob(self, pattern: str) -> Iterator[Any]:
            """Yields what fits the pattern inside this path, which is no pattern itself.

            That of etils takes it for one (test_any_name_is_written_and_read).
            """
            found = glob.glob(os.path.join(glob.escape(str(self)), pattern))
            return map(type(self), found)

        def rmtree(self, missing_ok: bool = False) -> None:
            """Removes a directory under another name, so that nobody finds half of it.

            What a killed process leaves has the name of an unfinished directory; orbax removes
            files under the checkpoint's own name (test_a_checkpoint_is_removed_under_another_name).
            """
            try:
                rest = self
                if UNFINISHED not in self.name:
                    rest = self.rename(self.with_name(self.name + ".removed" + UNFINISHED))
                super(Local, rest).rmtree(missing_ok)
            except OSError as error:
                if isinstance(error, FileNotFoundError) and missing_ok:
                    return
                warnings.warn(
                    f"{self} could not be removed: {reason(error)}. The next Manager of its "
                    "directory tries again; until then it takes up space.",
                    stacklevel=2,
                )

    return Local
