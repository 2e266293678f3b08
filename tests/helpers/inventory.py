"""Lists what pages carry besides words, and says where it is now.

``python tests/helpers/inventory.py REVISION`` compares the pages of a git revision with those of
the working tree: executed blocks, shown outputs, tables and pictures. Of each it prints the page
that has it now, the page that has something alike, or that it is gone.
"""

import difflib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\{code-cell\}|python|output)([^\n]*)\n(.*?)^```", re.M | re.S)
TABLE = re.compile(r"(?:^\|.*\n)+", re.M)
PICTURE = re.compile(r"[\w/]+\.(?:svg|png)")
ALIKE = 0.6  # of the lines of a block


def items(text):
    """Yields the kind, the first line and the content of what a page carries."""
    for kind, more, content in FENCE.findall(text):
        yield f"{kind.strip('{}')}{more}".strip(), content.strip().split("\n")[0], content.strip()
    for table in TABLE.findall(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
        yield "table", table.split("\n")[0], table.strip()
    for picture in dict.fromkeys(PICTURE.findall(text)):
        yield "picture", picture, Path(picture).name


def pages_at(revision):
    names = subprocess.check_output(
        ["git", "ls-tree", "-r", "--name-only", revision, "docs", "README.md"], cwd=ROOT, text=True
    )
    for name in filter(lambda name: name.endswith(".md"), names.split("\n")):
        yield (
            name,
            subprocess.check_output(["git", "show", f"{revision}:{name}"], cwd=ROOT, text=True),
        )


def alike(old, new):
    return difflib.SequenceMatcher(None, old.split("\n"), new.split("\n"), autojunk=False).ratio()


def place(kind, content, now):
    """Returns where an item of an old page is now, in words."""
    same = [page for page, found in now.items() if (kind, content) in found]
    if same:
        return f"in {same[0]}"
    near = [
        (alike(content, new), page)
        for page, found in now.items()
        for other, new in found
        if other == kind
    ]
    share, page = max(near, default=(0, ""))
    return f"changed, in {page}" if share >= ALIKE else "gone"


def main(revision):
    here = {
        p.relative_to(ROOT).as_posix(): p for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    }
    now = {
        name: {(kind, content) for kind, _, content in items(page.read_text())}
        for name, page in here.items()
    }
    for name, text in pages_at(revision):
        for kind, first, content in items(text):
            where = place(kind, content, now)
            if where != f"in {name}":
                print(f"{name}: {kind}: {first[:60]!r}: {where}")


if __name__ == "__main__":
    main(sys.argv[1])
