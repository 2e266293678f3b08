"""Links the names in docstrings, such as `autocast` or `jax.jit`. Other text in backquotes is code.

Sphinx writes annotations with the modules in which objects are defined, and expands type aliases.
This extension puts the public names back. Rows of reports have no public name; they are shown
without their module.
"""

import contextlib
import importlib
import re
import sys
import typing

import chex
import jax
import optax
from docutils import nodes
from sphinx.ext.autosummary import (
    ImportExceptionGroup,
    get_import_prefixes_from_env,
    import_by_name,
)
from sphinx.util.docutils import SphinxRole
from sphinx.util.typing import stringify_annotation

# The public modules, in the order in which names are looked for.
MODULES = (
    *("mpjax.optim", "mpjax.debug", "mpjax.hardware", "mpjax.reports", "mpjax.errors"),
    *("mpjax.checkpoint", "mpjax"),  # it still finds old names, which are in those above
    # These have names that it has too.
    *("mpjax.nnx", "mpjax.linen", "mpjax.keras", "mpjax.jmp"),
)
PUBLIC = {
    id(getattr(module, name)): f"{module.__name__}.{name}"
    for module in map(importlib.import_module, MODULES)
    for name in module.__all__
}
# Longer unions first: they begin with the text of shorter ones.
UNIONS = {
    optax.Params: "chex.ArrayTree",
    chex.ArrayTree: "chex.ArrayTree",
    jax.typing.ArrayLike: "jax.typing.ArrayLike",
}
ALIASES = {
    **{
        stringify_annotation(union, mode): name
        for union, name in UNIONS.items()
        for mode in ("smart", "fully-qualified", "fully-qualified-except-typing")
    },
    "jax.jaxlib._jax.Array": "jax.Array",
    "jaxlib._jax.Device": "jax.Device",
    "contextlib._GeneratorContextManager[None]": "contextlib.AbstractContextManager",
    "jmp._src.policy.": "jmp.",
    "optax._src.base.": "optax.",
    "flax.nnx.transforms.autodiff.": "flax.nnx.",
    "~P": "...",
}
# Types that are Any to type checkers, and so have no page.
PLAIN = ("DTypeLike", "LossScale")
# Types without a page of their own, and the function that describes their values.
DESCRIBED_BY = {"PolicyLike": "mpjax.get_policy"}
COLON = "\ue000"  # a private-use character that stands for a colon
INSIDE = re.compile(r"mpjax\._src\.([\w.]+)\.(\w+)")


class Name(SphinxRole):
    """A link to a public object; any other name is shown as code."""

    def run(self):
        prefixes = [p for p in get_import_prefixes_from_env(self.env) if p != "mpjax"]
        prefixes = [p for p in (*prefixes, *MODULES) if not self.text.startswith(f"{p}.")]
        with contextlib.suppress(ImportExceptionGroup):
            name, _, _, module = import_by_name(self.text, prefixes)
            if not module.startswith("mpjax._src."):
                link = self.env.get_domain("py").role("obj")
                text = f"{self.text} <{name}>"
                return link("obj", self.rawtext, text, self.lineno, self.inliner)
        return [nodes.literal(self.rawtext, self.text)], []


def public(text):
    """Returns the text of an annotation with public names."""

    def replacement(match):
        value = getattr(sys.modules[f"mpjax._src.{match[1]}"], match[2])
        if isinstance(value, typing.TypeVar):
            return match[2]
        return PUBLIC.get(id(value), match[0])

    for long, short in ALIASES.items():
        text = text.replace(long, short)
    return re.sub(r"~([A-Z])\b", r"\1", INSIDE.sub(replacement, text))


def find_public(app, env, node, content):
    """Resolves a signature's reference to the public name. Type variables and jmp have no page."""
    target = node.get("reftarget", "")
    node["reftarget"] = name = DESCRIBED_BY.get(target) or public(target)
    if re.fullmatch("[A-Z]", name) or name in PLAIN or name.startswith("jmp."):
        return content
    if name.startswith("mpjax.") and name != target:
        to, page = env.get_domain("py"), node["refdoc"]
        return to.resolve_xref(env, page, app.builder, "obj", name, node, content)
    return None  # Sphinx asks the other projects' inventories next


def name_parameters(app, domain, kind, content):
    for annotations in app.env.current_document.autodoc_annotations.values():
        annotations.update({name: public(text) for name, text in annotations.items()})


def hide_colons(app, what, name, value, options, lines):
    """Keeps napoleon from reading "The model: its steps" as a type and a description."""
    above = "Returns:" if what in ("attribute", "property") else ""
    for i, line in enumerate(lines):
        if above == "Returns:":
            lines[i] = line.replace(":", COLON)
        above = line.strip()


def name_attributes(app, what, name, value, options, lines):
    lines[:] = [public(line) if ":type:" in line else line.replace(COLON, ":") for line in lines]


def skip_fields(app, what, name, value, skip, options):
    """Skips fields of named tuples, which are attributes of their class, and parts of reports."""
    return True if type(value).__name__ == "_tuplegetter" or name == "document" else None


def setup(app):
    app.add_role("name", Name())
    app.connect("autodoc-process-docstring", hide_colons, priority=100)
    app.connect("autodoc-process-docstring", name_attributes, priority=900)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("missing-reference", find_public, priority=100)
    app.connect("object-description-transform", name_parameters, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
