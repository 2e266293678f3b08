"""The rows of a suite, which are written to one JSON file as soon as they are measured."""

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
# Keys of rows without figures; the value is the reason. A skipped row is tried again next time.
SKIPPED, FAILED = "skipped", "failed"

Row = dict[str, Any]


@dataclasses.dataclass
class Results:
    """The rows of a suite, by case and rival.

    Attributes:
        path: The JSON file.
        head: The versions, the device and the settings that all rows have in common.
        cases: The rows.
        other: The head of the file on disk, if it differs so that its rows were left out.
        fresh: Whether rows of the file are measured again.
        new: The case and rival of each row that was put since.
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
            fresh: Whether to measure the rows again. Each stays until it is replaced.
            **settings: Other settings of the head, such as "device" and "command". All except
                "command" must be the same in the file.
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
        """Returns a row, or None if it must still be measured."""
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
        """Writes the file atomically, so that no reader sees a part of it."""
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
    """Returns the versions of the packages that affect the figures."""
    return {name: importlib.import_module(name).__version__ for name in PACKAGES}


def device() -> str:
    """Returns the name of JAX's first device; for a CPU, with its number of cores."""
    kind = jax.devices()[0].device_kind
    return f"{kind}, {os.cpu_count()} cores" if jax.default_backend() == "cpu" else kind


def _comparable(head: Row) -> Row:
    """Returns the settings that rows must share to be compared."""
    compilers = {name: head.get("versions", {}).get(name) for name in ("jax", "jaxlib")}
    return {**head, "versions": compilers, "date": None, "command": None}


def _plain(data: Any) -> Any:
    """Returns data as JSON gives it back: tuples become lists, and keys become strings."""
    return json.loads(json.dumps(data))


def _short(value: Any) -> str:
    return f"{value:,.5g}" if isinstance(value, float) else str(value)
