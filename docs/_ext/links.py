"""Changes links from pages to files outside of docs/, so that they lead to pages of the site.

A link to an example leads to its page in the gallery. README is the first page; CHANGELOG and other
Markdown files have pages of the same name. A folder has no page, so its link becomes plain text.
"""

import re
from pathlib import Path

LINK = re.compile(r"(?<!!)\[([^\]\[]*)\]\(((?:\.\./)+[^)#\s]+)\)")


def lead_here(app, docname, source):
    """Changes links that leave docs/, before a page is parsed."""
    folder = Path(app.srcdir, docname).parent

    def target(match):
        text, path = match.groups()
        file = (folder / path).resolve()
        if file.is_relative_to(app.srcdir):
            return match[0]
        up = "../" * docname.count("/")
        if file.parent.name == "examples" and Path(app.srcdir, f"gallery/{file.stem}.md").exists():
            return f"[{text}]({up}gallery/{file.stem}.md)"
        if file.parent == Path(app.srcdir).parent and file.suffix == ".md":
            name = "index" if file.stem == "README" else file.stem.lower()
            return f"[{text}]({up}{name}.md)"
        return text if file.is_dir() else match[0]

    source[0] = LINK.sub(target, source[0])


def setup(app):
    app.connect("source-read", lead_here)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
