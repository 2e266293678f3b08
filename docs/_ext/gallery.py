"""Makes the gallery of docs/examples.md: cards on that page, and a page for each example.

docs/examples.md says which examples there are, in which order, what each shows, and with which
results. On the site, its tables become cards with curves. The text of an example's page, in
docs/gallery, is the example's docstring. Curves come from benchmarks/results/examples. Nothing is
trained.
"""

import ast
import json
import re
from pathlib import Path

import curves

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "examples"
TABLE = re.compile(r"^\| model \|.*\n\| -.*\n((?:\| .*\n)+)", re.MULTILINE)
ROW = re.compile(r"^\| (.*?) \| \[`(\w+)\.py`\]\([^)]*\) \| (.*?) \| (.*?) ?\|$", re.MULTILINE)
POLICY = ("mixed_", "O", "float32")
LIBRARY = {"common", "expected", "demo"}  # without a page of their own

LEGEND = """
In the pictures, gray is float32, with other seeds as thin lines, and colors are mixed precision.
The curves coincide, unless a card says otherwise. An example's page has all curves, with a legend,
and the source.
"""

CARD = """:::{{grid-item-card}} {model}
:link: gallery/{name}
:link-type: doc
{picture}
{shows}
{results}
:::
"""

PICTURE = """:img-top: gallery/{name}.svg
:img-alt: {alt}
:class-img-top: dark-light
"""

RESULTS_OF = """
```{{card-footer}}
{measured}
```"""

PAGE = """# {model}

{text}
{curves}
## Source

{{download}}`{name}.py <../../examples/{name}.py>`, without the text above:

```{{literalinclude}} ../../examples/{name}.py
:language: python
:lines: {first}-
```
"""

CURVES = """
## Curves

{seen}

```{{raw}} html
{figures}
```

{recorded}
"""


def examples() -> dict[str, tuple[str, str, str]]:
    """Returns the model, what is shown and the results of each example of docs/examples.md."""
    rows = ROW.findall((ROOT / "docs" / "examples.md").read_text())
    return {name: (model, shows, measured) for model, name, shows, measured in rows}


def recorded(name: str) -> dict:
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


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
    rows = [[f"`{row}`" if row.startswith(POLICY) else row, *cells] for row, *cells in rows]
    rows.insert(1, ["---"] + ["--:"] * (len(rows[0]) - 1))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page(name: str, model: str) -> str:
    runs, figures = recorded(name), ""
    if runs:
        (run, *_), *_ = runs.values()
        skipped = ", ".join(f"{row}: {seeds[0]['skipped']}" for row, seeds in runs.items())
        measured = (
            f"{run['steps']} steps on {run['device']} with jax {run['jax']}, seed {run['seed']}; "
            f"thin lines are other seeds of float32. Skipped steps: {skipped}."
        )
        figures = CURVES.format(
            seen=curves.seen(runs), figures=curves.figures(name, runs), recorded=measured
        )
    tree = ast.parse((ROOT / "examples" / f"{name}.py").read_text())
    first = tree.body[1].lineno  # below the docstring
    text = markdown(docstring(name))
    return PAGE.format(name=name, model=model, text=text, curves=figures, first=first)


def cards(table: re.Match) -> str:
    """Returns the cards of a table's examples."""
    return f"::::{{grid}} 1 2 3 3\n:gutter: 3\n\n{''.join(map(card, ROW.findall(table[1])))}::::\n"


def card(row: tuple[str, ...]) -> str:
    model, name, shows, measured = row
    runs = recorded(name)
    picture = PICTURE.format(name=name, alt=curves.alt(runs)) if runs else ""
    measured = curves.short(measured.partition(", spread")[0])
    if runs and (seen := curves.seen(runs)) != curves.COINCIDE:
        measured += f"\n\n{seen}"
    results = RESULTS_OF.format(measured=measured) if measured else ""
    shows = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", shows)  # the card is a link itself
    return CARD.format(model=model, name=name, picture=picture, shows=shows, results=results)


def show_cards(app, docname, source):
    """Shows the tables of docs/examples.md as cards."""
    if docname == "examples":
        text, heading, rest = source[0].partition("\n## ")
        source[0] = text + LEGEND + heading + TABLE.sub(cards, rest)


def write(folder: Path) -> None:
    """Writes the pages that changed. Sphinx does not rebuild the others."""
    folder.mkdir(exist_ok=True)
    files = {}
    for name, (model, _, _) in examples().items():
        files[f"{name}.md"] = page(name, model)
        if runs := recorded(name):
            files[f"{name}.svg"] = curves.thumbnail(name, runs)
    missing = {path.stem for path in (ROOT / "examples").glob("*.py")} - {*examples()} - LIBRARY
    assert not missing, f"docs/examples.md does not name {sorted(missing)}"
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
    newest = max(path.stat().st_mtime for path in made_of)
    pages = [path.stat().st_mtime for path in folder.glob("*.md")]
    if not pages or max(pages) < newest:
        write(folder)
        next(folder.glob("*.md")).touch()


def setup(app):
    app.connect("builder-inited", write_if_older)
    app.connect("source-read", show_cards)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
