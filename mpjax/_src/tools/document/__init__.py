"""Reports as self-contained pages of HTML."""
