"""Blocks of Python on README and the pages of docs: found, and run one after the other.

A block opens with ```python, and may name whose it is: ```python torch runs where torch is, and
```python numpy, which is for both sides, before each of them. What opens with ```output was printed
by the block above it; a line "..." stands for lines that are left out. Also a program, for the
interpreter of another framework, which knows neither JAX nor mpjax: what blocks leave, as JSON.
"""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MADE = ROOT / "docs" / "gallery"  # when the site is built
PAGES = [ROOT / "README.md", *sorted({*ROOT.glob("docs/**/*.md")} - {*MADE.glob("*.md")})]
BLOCK = re.compile(r"^```(python|output) *(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

OURS = ("", "numpy")


def kinds(page: Path) -> set[str]:
    """Returns whose blocks a page has."""
    return {kind for language, kind, _ in BLOCK.findall(page.read_text()) if language == "python"}


def run(page: Path, wanted=OURS, changes: dict[str, str] | None = None) -> dict:
    """Runs the blocks of some kinds, with parts of the page replaced; returns their names."""
    text = page.read_text()
    for old, new in (changes or {}).items():
        assert old in text, f"{page} has no {old!r}"
        text = text.replace(old, new)
    namespace = {"__name__": "__main__"}
    printed = None  # by the block above, if it ran
    for match in BLOCK.finditer(text):
        language, kind, code = match.groups()
        if language == "output":
            shown = printed is None or printed_as(code, printed)
            assert shown, f"{page} shows\n{code}\nbut it is\n{printed}"
        elif kind not in wanted:
            printed = None
        else:
            line = text[: match.start(3)].count("\n")
            with contextlib.redirect_stdout(io.StringIO()) as out, noted(f"{page}:{line}"):
                exec(compile(code, "model.py", "exec"), namespace)  # as reports name it there
            printed = out.getvalue()
    return namespace


@contextlib.contextmanager
def noted(where: str):
    """Adds to an error after which line of a page its block begins."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the block after {where}")
        raise


def printed_as(shown: str, printed: str) -> bool:
    """Tells whether a page shows what was printed, trailing blanks and lines left out aside."""
    lines = [line.rstrip() for line in printed.splitlines()]
    for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
        wanted = part.splitlines()
        found = [i for i in range(len(lines) + 1) if lines[i : i + len(wanted)] == wanted]
        if not found:
            return False
        lines = lines[found[0] + len(wanted) :]
    return True


if __name__ == "__main__":
    request = json.load(sys.stdin)
    found = run(Path(request["page"]), request["wanted"], request["changes"])
    print(json.dumps({name: found.get(name) for name in request["names"]}))
