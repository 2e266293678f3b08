"""The linter's report, as text, JSON and SARIF."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from mpjax._src.core.base.lines import short
from mpjax._src.core.base.public import public
from mpjax._src.tools.document.model import Document
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.lint.rule import Rule

SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class Finding:
    """A fault at one line.

    Attributes:
        rule: The name of the rule.
        source: "file:line" of the user's code, or "" if it is unknown.
        scope: The named scopes around the operation, joined with "/".
        message: What is wrong at this line.
        why: Why it matters.
        instead: What to write instead.
        count: The number of operations of the line that have the fault.
    """

    rule: str
    source: str
    scope: str
    message: str
    why: str
    instead: str
    count: int = 1


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class LintReport(Report):
    """The report of `lint`. ``print`` it, or read ``findings``; it is true if there are any.

    Attributes:
        target: The name of the function.
        findings: The faults, in the order of their lines.
        ran: The names of the rules that ran.
        not_run: The reason for each rule that could not run, by its name.
        suppressed: The faults that comments ``# mpjax: ignore`` silence.
        rules: The selected rules.
    """

    target: str
    findings: tuple[Finding, ...]
    ran: tuple[str, ...]
    not_run: dict[str, str]
    suppressed: tuple[Finding, ...]
    rules: tuple[Rule, ...] = dataclasses.field(repr=False, default=())

    _without = ("rules",)

    def __bool__(self) -> bool:
        return bool(self.findings)

    def document(self) -> Document:
        found = _count(len(self.findings) or "no", "finding")
        notes = [f"{self.target}: {found}; {_count(len(self.ran), 'rule')} ran"]
        if self.suppressed:
            ignored = ", ".join(f"{short(f.source)} {f.rule}" for f in self.suppressed)
            notes.append(f"suppressed: {ignored}")
        # Many rules lack the same, such as a target, and share a line.
        reasons: dict[str, list[str]] = {}
        for name, reason in self.not_run.items():
            reasons.setdefault(reason, []).append(name)
        notes += [f"not run: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
        findings = tuple(map(self._finding, self.findings))
        return Document("What the linter found", lines=findings, notes=tuple(notes))

    def _finding(self, each: Finding) -> str:
        times = f" ({each.count} operations)" if each.count > 1 else ""
        inside = [f"in {each.scope}"] if each.scope else []
        head = f"{short(each.source) or self.target}: {each.rule}{times}"
        return "\n".join([head, *inside, each.message, each.why, each.instead])

    def to_sarif(self) -> dict[str, Any]:
        """Returns the report as a SARIF 2.1.0 log for code scanning, ready for JSON.

        Files below the current directory have relative paths, other files absolute ones. Rules that
        did not run become notifications.
        """
        index = {rule.name: i for i, rule in enumerate(self.rules)}
        driver = {
            "name": "mpjax lint",
            "version": sys.modules[__name__.split(".")[0]].__version__,
            "rules": [_rule_of_sarif(rule) for rule in self.rules],
        }
        notes = [
            {
                "level": "note",
                "message": {"text": f"{name} was not run: {reason}"},
                "associatedRule": {"id": name, "index": index[name]},
            }
            for name, reason in self.not_run.items()
        ]
        # SARIF has a mark for suppressed results, so that code scanning can list them too.
        quiet = {"suppressions": [{"kind": "inSource"}]}
        results = [_result_of_sarif(each, index[each.rule]) for each in self.findings]
        results += [_result_of_sarif(each, index[each.rule]) | quiet for each in self.suppressed]
        run = {
            "tool": {"driver": driver},
            "columnKind": "unicodeCodePoints",
            "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notes}],
            "results": results,
        }
        return {"$schema": SARIF, "version": "2.1.0", "runs": [run]}


def _rule_of_sarif(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.name,
        "shortDescription": {"text": f"{rule.summary[0].upper()}{rule.summary[1:]}."},
        "fullDescription": {"text": rule.why},
        "help": {"text": rule.instead},
        "defaultConfiguration": {"level": "warning"},
        "properties": {"needs": rule.needs},
    }


def _location_of_sarif(each: Finding) -> dict[str, Any]:
    location: dict[str, Any] = {}
    file, _, line = each.source.rpartition(":")
    if file:
        region = {"startLine": max(1, int(line))}  # SARIF counts from 1; 0 is an unknown line
        location["physicalLocation"] = {"artifactLocation": {"uri": _uri(file)}, "region": region}
    if each.scope:
        location["logicalLocations"] = [{"fullyQualifiedName": each.scope}]
    return location


def _result_of_sarif(each: Finding, index: int) -> dict[str, Any]:
    location = _location_of_sarif(each)
    return {
        "ruleId": each.rule,
        "ruleIndex": index,
        "level": "warning",
        "message": {"text": f"{each.message} {each.why} {each.instead}"},
        "occurrenceCount": each.count,
        **({"locations": [location]} if location else {}),
    }


def _uri(file: str) -> str:
    """Returns a file as a URI: relative below the current directory, absolute elsewhere."""
    from urllib.parse import quote

    path = Path(file)
    if not path.is_absolute():
        return quote(path.as_posix())
    try:
        return quote(path.relative_to(Path.cwd()).as_posix())
    except (ValueError, OSError):  # the file is elsewhere, or the directory was removed
        return path.as_uri()


def _count(count: int | str, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"
