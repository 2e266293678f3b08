"""Fences of our pages: ```output is what was printed by the block above it."""

from pygments.lexers.special import TextLexer


def setup(app):
    app.add_lexer("output", TextLexer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
