"""The help of the command line is plain text: nothing in it is markup."""

import re


def escape(app, ctx, lines):
    lines[:] = [re.sub(r"(?<![*\\])\*(?!\*)", r"\\*", line) for line in lines]


def setup(app):
    app.connect("sphinx-click-process-options", escape)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
