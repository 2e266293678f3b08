"""Finds the Python blocks of README and of the pages of docs, and runs them one after the other.

A block opens with ```python. A kind may follow: ```python torch runs in an environment with torch,
and ```python numpy runs on both sides, before the other blocks. ```output contains what the block
above it printed. A line "..." in it stands for omitted lines. This module is also a program for the
interpreters of other frameworks, which have neither JAX nor mpjax: it prints the variables that
blocks define, as JSON.
"""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MADE = ROOT / "docs" / "gallery"  # exists after the site is built
PAGES = [ROOT / "README.md", *sorted({*ROOT.glob("docs/**/*.md")} - {*MADE.glob("*.md")})]
BLOCK = re.compile(r"^```(python|output) *(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

OURS = ("", "numpy")


def kinds(page: Path) -> set[str]:
    """Returns the kinds of blocks on a page."""
    return {kind for language, kind, _ in BLOCK.findall(page.read_text()) if language == "python"}


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def run(page: Path, wanted=OURS, changes: dict[str, str] | None = None) -> dict:
    """Runs the blocks of some kinds, with parts of the page replaced; returns their names."""
    text = page.read_text()
    for old, new in (changes or {}).items():
        assert old in text, f"{page} has no {old!r}"
        text = text.replace(old, new)
    namespace = {"__name__": "__main__"}
    printed = None  # the output of the block above, if it ran
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
                exec(compile(code, "model.py", "exec"), namespace)  # reports name this file there
            printed = out.getvalue()
    return namespace


@contextlib.contextmanager
def noted(where: str):
    """Adds to an error the line of the page after which its block begins."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the block after {where}")
        raise


def printed_as(shown: str, printed: str) -> bool:
    """Returns whether a page shows what was printed. Trailing blanks may differ."""
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
