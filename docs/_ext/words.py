"""Words that users type in the search box, and the page that has to come first.

Each becomes an entry of the index, which the search ranks above titles and text.
"""

from docutils import nodes
from sphinx import addnodes

WORDS = {
    "checkpoints": ("checkpoint", "save", "resume"),
    "frameworks": ("nnx", "linen", "equinox", "haiku", "keras"),
    "inference": ("inference", "generate"),
    "lint": ("lint",),
    "memory": ("oom", "out of memory"),
    "nan": ("nan", "inf", "overflow"),
    "policies": ("bf16", "fp16", "float16", "bfloat16"),
    "scaling": ("fsdp", "sharding"),
    "slow": ("slow", "profile"),
    "training": ("accumulate", "clip"),
    "weights": ("master weights",),
    "will_it_help": ("speedup", "faster"),
}


def add_entries(app, doctree):
    """Adds main entries of the index to a page's title."""
    if words := WORDS.get(app.env.docname):
        section = doctree.next_node(nodes.section)
        entries = [("single", word, section["ids"][0], "main", None) for word in words]
        section.insert(1, addnodes.index(entries=entries, inline=False))


def setup(app):
    app.connect("doctree-read", add_entries)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
