"""The Sphinx configuration of the site that `make docs` builds."""

import os
import re
import sys
import tomllib
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # pages are executed on the machine that builds the site
os.environ["KERAS_BACKEND"] = "jax"
os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # silences a warning of the kernel's debugger

import mpjax

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "_ext"))

project = "mpjax"
author = "The mpjax authors"
copyright = author
version = release = mpjax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_design",
    # in docs/_ext
    "click_text",
    "gallery",
    "fences",
    "links",
    "live_map",
    "names",
    "redirects",
    "words",
]

# Pages that are executed: an error, or anything on stderr, fails the build.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 240
nb_output_stderr = "error"
nb_merge_streams = True
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "html_image"]

default_role = "name"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_default_options = {
    "members": True,
    # Shows inherited members of our own base classes, but not of these.
    "inherited-members": ",".join(
        ("tuple", "BaseException", "GradientTransformationExtraArgs", "Optimizer", "TrainState")
    ),
}
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_attr_annotations = True
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

# The inventories of other projects are committed. They hold the names that our pages use, so a
# build gives the same site with and without a network, and a page that moves cannot break it.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", "inventories/python.inv"),
    "jax": ("https://docs.jax.dev/en/latest/", "inventories/jax.inv"),
    "flax": ("https://flax.readthedocs.io/en/latest/", "inventories/flax.inv"),
    "numpy": ("https://numpy.org/doc/stable/", "inventories/numpy.inv"),
    "optax": ("https://optax.readthedocs.io/en/latest/", "inventories/optax.inv"),
}
nitpick_ignore = [
    # These have no page in their project's documentation.
    *(("py:class", name) for name in ("chex.ArrayTree", "flax.nnx.DiffState")),
    *(("py:class", f"optax.Transform{name}Fn") for name in ("Init", "UpdateExtraArgs")),
    ("py:class", "mpjax._src.core.autocast.regions.Region"),  # a context manager and decorator
    ("py:class", "mpjax._src.core.policy.policy.FoundPolicy"),  # a Tuning or a Calibration
    *(("py:obj", f"jax.sharding.{name}") for name in ("AbstractMesh", "reshard")),
]

smartquotes = False  # keeps the dashes of "--policy"

html_theme = "pydata_sphinx_theme"
html_title = "mpjax"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_sourcelink = False
html_copy_source = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "logo": {"text": f"mpjax {release}"},
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "header_links_before_dropdown": 8,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
# Once pyproject.toml has the address of the repository, pages link to their source there.
about = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
address = about.get("urls", {}).get("Repository", "")
if found := re.match(r"https://github\.com/([\w.-]+)/([\w.-]+)", address):
    html_context |= {"github_user": found[1], "github_repo": found[2]}
    html_context |= {"github_version": "main", "doc_path": "docs"}
    html_theme_options |= {"use_edit_page_button": True, "github_url": found[0]}
    html_theme_options["secondary_sidebar_items"].append("edit-this-page")

exclude_patterns = ["_ext", "_build"]
