"""Old addresses of pages and headings lead to new ones: `redirects.json` lists them.

A page that was removed is left as one that leads on. Where only a heading moved, the page that had
it leads on.
"""

import functools
import json
from pathlib import Path

LEAVE = """(() => {{
  const moved = {moved};
  const anchor = location.hash.slice(1);
  const to = document.getElementById(anchor) ? undefined : moved[anchor];
  if (to) location.replace(to);
}})();"""

STUB = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>This page has moved</title>
<link rel="canonical" href="{page}">
<script>const moved = {moved};
location.replace(moved[location.hash.slice(1)] || "{page}");</script>
<noscript><meta http-equiv="refresh" content="0; url={page}"></noscript>
</head>
<body><main><h1>This page has moved</h1><p><a href="{page}">Go to the new page</a></p></main></body>
</html>
"""


@functools.cache
def listed(folder):
    return json.loads(Path(folder, "redirects.json").read_text())


def moved(app, docname):
    """Returns the new addresses of a page's old headings, relative to it; "" is the page itself."""
    up = "../" * docname.count("/")
    found = {}
    for old, new in listed(app.srcdir).items():
        page, _, anchor = old.partition("#")
        if page == docname:
            target, _, heading = new.partition("#")
            found[anchor] = f"{up}{target}.html" + (f"#{heading}" if heading else "")
    return found


def lead_from_here(app, pagename, templatename, context, doctree):
    """Adds to a page the new places of headings that it had."""
    if found := moved(app, pagename):
        app.add_js_file(None, body=LEAVE.format(moved=json.dumps(found)))


def leave_pages(app, exception):
    """Writes a page at each address from which a page was removed."""
    if exception or app.builder.format != "html":
        return
    for docname in (old for old in listed(app.srcdir) if "#" not in old):
        found = moved(app, docname)
        file = Path(app.outdir, f"{docname}.html")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(STUB.format(page=found[""], moved=json.dumps(found)))


def setup(app):
    app.connect("html-page-context", lead_from_here)
    app.connect("build-finished", leave_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
