"""The base class of all reports: how they print, are drawn, and become plain data."""

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from mpjax._src.tools.document.html import framed, page_of
from mpjax._src.tools.document.model import Document
from mpjax._src.tools.document.text import text_of


class Report:
    """The base class of all reports, which can be printed, shown in a notebook or saved as HTML."""

    # Of plain data: the fields that it leaves out, and the properties that it has too.
    _without: ClassVar[tuple[str, ...]] = ()
    _also: ClassVar[tuple[str, ...]] = ()
    # Of a report of arrays: what a step calls it, an array, and its axes in the report of one step.
    _array: ClassVar[tuple[str, str, int]] = ("", "", 0)

    def document(self) -> Document:
        """Returns what the report shows, as plain data."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, ready for JSON. Waits for the device."""
        return fields_of(self)

    def logged(self, loss_scale: float = 1.0) -> Mapping[str, float | str]:
        """Returns what `log_metrics` logs of the report, by name.

        Args:
            loss_scale: The loss scale of the step, a power of two.
        """
        return {}

    def to_html(self, title: str = "") -> str:
        """Returns the report as a self-contained HTML page.

        Args:
            title: The title of the page. By default, the kind of the report.

        Returns:
            The text of the HTML file. It loads nothing from elsewhere.

        Raises:
            ImportError: If jinja2, which the extra ``html`` installs, is missing.
        """
        return page_of(self.document(), title)

    @property
    def is_read(self) -> bool:
        """Whether the report is of one step, and its arrays have values."""
        _, name, axes = self._array
        # A report of several steps, or one that is being traced, has no text: `repr` is shown
        # instead.
        array = operator.attrgetter(name)(self) if name else 0
        return not isinstance(array, jax.core.Tracer) and np.ndim(array) == axes

    def _check_one(self) -> None:
        """Raises a ValueError if the report is of several steps."""
        called, name, axes = self._array
        shape = np.shape(operator.attrgetter(name)(self))
        if len(shape) != axes:
            raise ValueError(
                f"{called} contains the reports of several steps or ensemble members, of shape "
                f"{shape}. Select one first, such as jax.tree.map(lambda x: x[-1], {called})"
            )

    def __str__(self) -> str:
        return text_of(self.document()) if self.is_read else repr(self)

    def _repr_html_(self) -> str | None:
        """Returns the page in a frame, or None if jinja2 is missing: notebooks then show text."""
        try:
            return framed(self.document()) if self.is_read else None
        except ImportError:
            return None

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("..." if cycle else str(self))


# ---- plain data ----------------------------------------------------------------------------------


def fields_of(record: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass as plain data, without ``_without`` and with ``_also``."""
    names = [field.name for field in dataclasses.fields(record)]
    left_out, also = (getattr(record, name, ()) for name in ("_without", "_also"))
    shown = (*(name for name in names if name not in left_out), *also)
    return {name: plain(getattr(record, name)) for name in shown}


def plain(value: Any) -> Any:
    """Returns a value as dictionaries, lists, numbers and strings."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return fields_of(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return np.asarray(value).tolist()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
