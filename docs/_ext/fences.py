"""Adds a lexer for ```output blocks, which show what the block above them printed."""

from pygments.lexers.special import TextLexer


def setup(app):
    app.add_lexer("output", TextLexer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
