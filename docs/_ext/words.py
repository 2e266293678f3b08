"""Words that users type in the search box, and the page that has to come first.

Each becomes an entry of the index, which the search ranks above titles and text. Those of
questions.json lead to the section that answers the question.
"""

import json
from pathlib import Path

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
QUESTIONS = json.loads((Path(__file__).parents[1] / "questions.json").read_text())


def add_entries(app, doctree):
    """Adds main entries of the index to a page's title."""
    section = doctree.next_node(nodes.section)
    entries = [(word, section["ids"][0]) for word in WORDS.get(app.env.docname, ())]
    for question in QUESTIONS:
        page, _, anchor = question["page"].partition("#")
        if page == app.env.docname:
            entries.append((question["words"].lower(), anchor or section["ids"][0]))
    if entries:
        found = [("single", word, place, "main", None) for word, place in entries]
        section.insert(1, addnodes.index(entries=found, inline=False))


def setup(app):
    app.connect("doctree-read", add_entries)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
