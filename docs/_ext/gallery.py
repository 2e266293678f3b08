"""Writes the gallery into docs/gallery: a page and a small picture for each example.

docs/examples.md says which examples there are, in which order, and what each shows. The text of a
page is the example's docstring. Its curves come from benchmarks/results/examples. Nothing is
trained.
"""

import ast
import json
import re
from pathlib import Path

import curves

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "examples"
SECTION = re.compile(r"^## (.*)", re.MULTILINE)
ROW = re.compile(r"^\| \[`(\w+)\.py`\]\([^)]*\) \| (.*?) \|", re.MULTILINE)
NAMED = re.compile(r"`(\w+)\.py`")
HALF = ("mixed_", "O", "float32")
LIBRARY = {"common", "expected"}  # what the examples share, and what measures their tables

INDEX = """# Gallery

Every example is one file. The curves compare float32 with mixed precision, from the same seed. They
were recorded on a CPU, at the small size of each example. [Options, and how the figures are
checked](../examples.md).

```{{toctree}}
:hidden:

{toctree}
../demo
../examples
```
{sections}"""

CARD = """:::{{grid-item-card}} {name}.py
:link: {name}
:link-type: doc
{picture}
{shows}
:::
"""

PICTURE = """:img-top: {name}.svg
:img-alt: {alt}
:class-img-top: dark-light
"""

PAGE = """# {name}.py

{text}
{curves}
## Source

{{download}}`{name}.py <../../examples/{name}.py>`

```{{literalinclude}} ../../examples/{name}.py
:language: python
```
"""

CURVES = """
## Curves

```{{raw}} html
{figures}
```

{recorded}
"""


def sections() -> dict[str, dict[str, str]]:
    """Returns the examples of docs/examples.md by section, with what each of them shows."""
    _, *parts = SECTION.split((ROOT / "docs" / "examples.md").read_text())
    found = {}
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        shown = dict(ROW.findall(text))
        rest = [name for name in NAMED.findall(text) if name not in shown]
        found[title] = shown | {name: docstring(name).split(".\n")[0] for name in rest}
    return found


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text())) or ""


def markdown(text: str) -> str:
    """Turns a docstring into Markdown: commands, tables of figures and paragraphs."""
    return "\n\n".join(map(block, re.split(r"\n\s*\n", text)))


def block(text: str) -> str:
    if not text.startswith("    "):
        return text
    lines = [line.strip() for line in text.splitlines()]
    if lines[0].startswith("python "):
        return "\n".join(["```console", *(f"$ {line}" for line in lines), "```"])
    if not lines[0].startswith("policy "):
        return f"```text\n{text}\n```"
    rows = [re.split(r"\s{2,}", line.replace("|", r"\|")) for line in lines]
    rows = [[f"`{row}`" if row.startswith(HALF) else row, *cells] for row, *cells in rows]
    rows.insert(1, ["---"] + ["--:"] * (len(rows[0]) - 1))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page(name: str, runs: dict) -> str:
    text, figures = markdown(docstring(name)), ""
    if runs:
        (run, *_), *_ = runs.values()
        skipped = ", ".join(f"{row}: {seeds[0]['skipped']}" for row, seeds in runs.items())
        recorded = (
            f"{run['steps']} steps on {run['device']} with jax {run['jax']}, seed {run['seed']}; "
            f"thin lines are other seeds of float32. Skipped steps: {skipped}."
        )
        figures = CURVES.format(figures=curves.figures(name, runs), recorded=recorded)
    return PAGE.format(name=name, text=text, curves=figures)


def card(name: str, shows: str, runs: dict) -> str:
    picture = PICTURE.format(name=name, alt=curves.alt(runs)) if runs else ""
    return CARD.format(name=name, shows=shows, picture=picture)


def write(folder: Path) -> None:
    """Writes the pages that changed. Sphinx does not rebuild the others."""
    folder.mkdir(exist_ok=True)
    files, shown = {}, ""
    for title, examples in sections().items():
        cards = []
        for name, shows in examples.items():
            recorded = RESULTS / f"{name}.json"
            runs = json.loads(recorded.read_text()) if recorded.exists() else {}
            cards.append(card(name, shows, runs))
            files[f"{name}.md"] = page(name, runs)
            if runs:
                files[f"{name}.svg"] = curves.thumbnail(name, runs)
        if cards:
            shown += f"\n## {title}\n\n::::{{grid}} 1 2 3 3\n:gutter: 3\n\n{''.join(cards)}::::\n"
    names = [file.removesuffix(".md") for file in files if file.endswith(".md")]
    missing = {path.stem for path in (ROOT / "examples").glob("*.py")} - {*names} - LIBRARY
    assert not missing, f"docs/examples.md does not name {sorted(missing)}"
    files["index.md"] = INDEX.format(toctree="\n".join(names), sections=shown)
    for path in {*folder.iterdir()} - {folder / file for file in files}:
        path.unlink()
    for file, text in files.items():
        path = folder / file
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def write_if_older(app):
    folder = Path(app.srcdir) / "gallery"
    made_of = [
        *Path(__file__).parent.glob("*.py"),
        *(ROOT / "examples").glob("*.py"),
        *RESULTS.glob("*.json"),
        ROOT / "docs" / "examples.md",
    ]
    index = folder / "index.md"
    newest = max(path.stat().st_mtime for path in made_of)
    if not index.exists() or index.stat().st_mtime < newest:
        write(folder)
        index.touch()


def setup(app):
    app.connect("builder-inited", write_if_older)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
