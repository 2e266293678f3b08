"""Prepares the command line's help for Sphinx: escapes its markup, and shows examples as code."""

import re


def escape(app, ctx, lines):
    lines[:] = [re.sub(r"(?<![*\\])\*(?!\*)", r"\\*", line) for line in lines]


def show_examples(app, ctx, lines):
    """Turns the lines under "Examples:" into a code block."""
    text = "\n".join(lines)
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        title, *examples = (line.removeprefix("|").strip() for line in block.strip().splitlines())
        code = "".join(f"   $ {example}\n" for example in examples)
        text = text.replace(block, f"{title}\n\n.. code-block:: console\n\n{code}\n")
    lines[:] = text.split("\n")


def setup(app):
    app.connect("sphinx-click-process-options", escape)
    app.connect("sphinx-click-process-description", show_examples)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
