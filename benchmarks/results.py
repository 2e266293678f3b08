"""Rows of figures that are written as they come, one JSON file for a suite."""

import dataclasses
import datetime
import importlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import click
import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "mpjax")
# A row that says why there are no figures. What is skipped is tried again the next time.
SKIPPED, FAILED = "skipped", "failed"

Row = dict[str, Any]


@dataclasses.dataclass
class Results:
    """The rows of a suite, by case and rival.

    Attributes:
        path: The JSON file.
        head: What all rows have in common: versions, device, settings; the date of the last row.
        cases: The rows.
        other: What the file on disk was measured with instead, where its rows were left out.
        fresh: Whether rows count that were there before.
    """

    path: Path
    head: Row
    cases: dict[str, dict[str, Row]]
    other: Row | None = None
    fresh: bool = False
    new: set[tuple[str, str]] = dataclasses.field(default_factory=set)

    @classmethod
    def open(cls, path: Path, *, fresh: bool = False, **settings: Any) -> "Results":
        """Reads the rows of a file that were measured with the same JAX, device and settings.

        Args:
            path: The file; it need not exist.
            fresh: Treat the rows as not measured yet, though they stay until they are replaced.
            **settings: Whatever else rows must have in common, "device" and "command" among them.
        """
        settings = settings if "device" in settings else {"device": device(), **settings}
        head = {"versions": versions(), **settings}
        stored = json.loads(path.read_text()) if path.exists() else {}
        cases = stored.pop("cases", {})
        same = _comparable(stored) == _comparable(_plain(head))
        if cases and not same:
            return cls(path, head, {}, stored, fresh)
        return cls(path, head, cases, None, fresh)

    def get(self, case: str, rival: str) -> Row | None:
        """Returns a row; None if it is still to be measured."""
        row = self.cases.get(case, {}).get(rival)
        stale = self.fresh and (case, rival) not in self.new
        return None if row is None or stale or SKIPPED in row else row

    def put(self, case: str, rival: str, row: Row) -> None:
        """Adds a row, prints it and writes the file."""
        self.cases.setdefault(case, {})[rival] = _plain(row)
        self.new.add((case, rival))
        cells = "  ".join(f"{k} {_short(v)}" for k, v in row.items() if not isinstance(v, dict))
        click.echo(f"{case:<24} {rival:<26} {cells}")
        self.write()

    def write(self) -> None:
        """Writes the file whole, so that whoever reads it never sees half of one."""
        head = {**self.head, "date": datetime.date.today().isoformat()}
        text = json.dumps({**head, "cases": self.cases}, indent=1) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=self.path.parent, prefix=f".{self.path.name}", delete=False
        ) as file:
            file.write(text)
        os.chmod(file.name, 0o644)
        os.replace(file.name, self.path)


def versions() -> dict[str, str]:
    """Returns the versions that figures depend on."""
    return {name: importlib.import_module(name).__version__ for name in PACKAGES}


def device() -> str:
    """Returns what the device at hand calls itself, and of a CPU how many cores there are."""
    kind = jax.devices()[0].device_kind
    return f"{kind}, {os.cpu_count()} cores" if jax.default_backend() == "cpu" else kind


def _comparable(head: Row) -> Row:
    """Returns what rows must share to stand in one table: not flax's version, nor the date."""
    compilers = {name: head.get("versions", {}).get(name) for name in ("jax", "jaxlib")}
    return {**head, "versions": compilers, "date": None, "command": None}


def _plain(data: Any) -> Any:
    """Returns data as JSON gives it back: tuples as lists, keys as strings."""
    return json.loads(json.dumps(data))


def _short(value: Any) -> str:
    return f"{value:,.5g}" if isinstance(value, float) else str(value)
