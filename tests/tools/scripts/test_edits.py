"""Diffs that add mixed precision to other people's scripts apply, run, and change nothing else."""

import ast
import re
import subprocess
from pathlib import Path

import jax.numpy as jnp
import pytest
from training_scripts import LINES, OPTAX, SCRIPTS

import mpjax
from mpjax._src.tools.scripts.differentiated import Use, gradients, name_of
from mpjax._src.tools.scripts.edits import proposed
from mpjax._src.tools.scripts.hooks import hooked
from mpjax._src.tools.scripts.source import Source

ROOT = Path(mpjax.__file__).parents[1]
POLICIES = ("mixed_bfloat16", "mixed_float16")


@pytest.fixture
def folder(tmp_path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def written(folder, text, name="train.py"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def uses_in(path):
    """Returns each use that a run of a script can report."""
    source = Source(path)
    line = lambda node: source.line_of(source.span(node)[0])  # noqa: E731
    found = [each for each in gradients(source) if "." in each.name]
    return [Use(str(path), line(g.node), g.transform, name_of(g.fun)) for g in found]


def applied(proposal):
    command = ["git", "apply", "--whitespace=nowarn", "-"]
    subprocess.run(command, cwd=proposal.root, input=proposal.diff.encode(), check=True)


def added(proposal):
    """Returns the lines that a diff adds, but for the import."""
    lines = [line[1:].strip() for line in proposal.diff.splitlines() if re.match(r"\+(?!\+)", line)]
    return [line for line in lines if line != "import mpjax"]


def run(path, around=lambda fun: fun):
    """Runs a script; returns its losses and what it was seen to differentiate."""
    uses = {}

    def seen(fun, site):
        uses[Use(site.file, site.line, site.transform, site.fun)] = None
        return around(fun)

    names = {"__name__": "__main__"}
    with hooked(seen):
        exec(compile(path.read_bytes(), str(path), "exec"), names)
    return [float(loss) for loss in names["losses"]], [*uses]


@pytest.mark.parametrize("style", SCRIPTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_lines_of_each_style(folder, style, policy):
    path = written(folder, SCRIPTS[style])
    proposal = proposed(uses_in(path), policy)
    assert added(proposal) == LINES[style][POLICIES.index(policy)]
    assert proposal.root == str(folder)
    applied(proposal)
    assert path.read_text().count("import mpjax\n") == 1
    again = proposed(uses_in(path), policy)
    assert not again.diff and all("under mpjax already" in said for said in again.missing)


QUICK = {("optax", "mixed_bfloat16"), ("decorated", "mixed_float16")}
RUNS = [
    pytest.param(style, policy, marks=() if (style, policy) in QUICK else pytest.mark.thorough)
    for style in SCRIPTS
    for policy in POLICIES
]


@pytest.mark.parametrize(("style", "policy"), RUNS)
def test_a_changed_script_runs_as_by_hand(folder, style, policy):
    path = written(folder, SCRIPTS[style])
    plain, uses = run(path)
    proposal = proposed(uses, policy)
    applied(proposal)
    losses, again = run(path)
    assert not proposed(again, policy).diff
    if policy == "mixed_bfloat16":
        path.write_text(SCRIPTS[style])
        by_hand, _ = run(path, lambda fun: mpjax.autocast(fun, policy))
        assert losses == by_hand != plain
    else:  # a step or two may be skipped until the loss scale fits
        assert losses[-1] < losses[0] and jnp.allclose(losses[0], plain[0], rtol=1e-2)


# Other spellings


def test_characters_that_no_edit_names_stay(folder):
    text = OPTAX.replace("\n", "\r\n").replace("    ", "\t")
    text = text.replace("A script", "Skripte für Ångström").rstrip()
    path = written(folder, b"\xef\xbb\xbf" + text.encode(), "größe 2.py")
    applied(proposed(uses_in(path), "mixed_bfloat16"))
    new = text.replace("jax.value_and_grad(loss_fn)", LINES["stored"][0][0][10:])
    new = new.replace("import optax", "import optax\r\nimport mpjax")
    assert path.read_bytes() == b"\xef\xbb\xbf" + new.encode()


@pytest.mark.parametrize("name", ['a"b.py', "a\\b.py", "a\tb.py", "sub dir/ü.py"])
def test_git_takes_the_names_of_all_files(folder, name):
    (folder / "sub dir").mkdir()
    path = written(folder, OPTAX, name)
    applied(proposed(uses_in(path), "mixed_bfloat16"))
    assert "mpjax" in path.read_text()


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("ä = 'ü'; g = jax.grad(f)(x)", "ä = 'ü'; g = jax.grad(AUTO)(x)"),
        ("g = jax.grad(f)(x); h = jax.grad(k)(x)", "g = jax.grad(AUTO)(x); h = jax.grad(k)(x)"),
        ("g = jax.grad(jax.grad(f))(x)", "g = jax.grad(mpjax.autocast(jax.grad(f), P))(x)"),
        ("g = (d := jax.grad)(f)(x)", None),
        ("g = jax.grad(d := f)(x)", "g = jax.grad(mpjax.autocast(d := f, P))(x)"),
        ("g = jax. \\\n  grad(f)(x)", "g = jax. \\\n  grad(AUTO)(x)"),
        ("d = jax.grad\ng = d(f)(x)", "d = jax.grad\ng = d(AUTO)(x)"),
        ("g = jax.vmap(jax.grad(f))(x)", "g = jax.vmap(jax.grad(AUTO))(x)"),
        ("g = functools.partial(jax.grad, f)()(x)", "g = functools.partial(jax.grad, AUTO)()(x)"),
        ("def g(f):  # type: (object) -> object\n  return jax.grad(f)(x)",
         "def g(f):  # type: (object) -> object\n  return jax.grad(AUTO)(x)"),
        ("async def g():\n  return jax.grad(f)(x)", "async def g():\n  return jax.grad(AUTO)(x)"),
        ("if (g := jax.grad(f)(x)) is None: pass", "if (g := jax.grad(AUTO)(x)) is None: pass"),
        ("t = f'{jax.grad(f)(x)}'", None),
        ("g = [jax.grad(f)(v) for v in [x]]", "g = [jax.grad(AUTO)(v) for v in [x]]"),
        ("g = jax.grad(*(f,))(x)", None),
        ("g = getattr(jax, 'grad')(f)(x)", None),
    ],
)  # fmt: skip
def test_spellings(folder, line, new):
    head = "import functools\nimport jax\n"
    path = written(folder, f"{head}{line}\n")
    number = 2 + max(i for i, each in enumerate(line.split("\n"), 1) if "f)" in each or i == 1)
    proposal = proposed([Use(str(path), number, "grad", "f")], "mixed_bfloat16")
    if new is None:
        assert not proposal.diff and "train.py:3: " in proposal.missing[0]
        return
    applied(proposal)
    new = new.replace("AUTO", "mpjax.autocast(f, P)").replace("P)", '"mixed_bfloat16")')
    assert path.read_text() == f"{head}import mpjax\n{new}\n"


def test_a_line_that_only_calls_a_gradient_leads_to_where_it_is_made(folder):
    text = (
        "import jax\ng = jax.jit(jax.grad(f))\n@jax.grad\ndef h(x):\n    return x\n\n\ng(x)\nh(x)\n"
    )
    path = written(folder, text)
    uses = [Use(str(path), 8, "grad", "f"), Use(str(path), 9, "grad", "h")]
    lines = added(proposed(uses, "mixed_bfloat16"))
    assert lines == [
        'g = jax.jit(jax.grad(mpjax.autocast(f, "mixed_bfloat16")))',
        '@mpjax.autocast(policy="mixed_bfloat16")',
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import jax\nimport numpy\n", "import jax\nimport numpy\n+"),
        ("import jax\nx = 1; import os\n", "import jax\n+x = 1; import os\n"),
        ("import jax; import os\n", "import jax; import os\n+"),
        ("import numpy as np\nfrom jax import numpy\nimport jax\n",
         "import numpy as np\nfrom jax import numpy\nimport jax\n+"),
        ("try:\n  import jax\nexcept ImportError:\n  raise\n",
         "+try:\n  import jax\nexcept ImportError:\n  raise\n"),
        ("if TYPE_CHECKING:\n  import mpjax\nimport jax\n",
         "if TYPE_CHECKING:\n  import mpjax\nimport jax\n+"),
        ('#!python\n# coding: utf-8\n"""Doc."""\nfrom __future__ import annotations\ng = 1\n',
         '#!python\n# coding: utf-8\n"""Doc."""\nfrom __future__ import annotations\n+g = 1\n'),
        ("#!python\n# License\n\njax = 1\n", "#!python\n# License\n+\njax = 1\n"),
        ("import jax\nimport mpjax\n", "import jax\nimport mpjax\n"),
    ],
)  # fmt: skip
def test_the_import_stands_after_others(folder, before, after):
    line = "def run():\n  import jax\n  return jax.grad(f)\n"
    path = written(folder, before + line)
    number = len((before + line).splitlines())
    applied(proposed([Use(str(path), number, "grad", "f")], "mixed_bfloat16"))
    line = line.replace("(f)", '(mpjax.autocast(f, "mixed_bfloat16"))')
    assert path.read_text() == after.replace("+", "import mpjax\n") + line


def test_the_name_that_a_script_has_for_mpjax(folder):
    path = written(folder, "import jax\nimport mpjax as mp\ng = jax.grad(f)\n")
    assert "jax.grad(mp.autocast(f, " in proposed(uses_in(path), "mixed_bfloat16").diff
    path = written(folder, "import jax\nmpjax = 1\ng = jax.grad(f)\n")
    diff = proposed(uses_in(path), "mixed_bfloat16").diff
    assert "+import mpjax as mpjax_\n" in diff and "mpjax_.autocast(f, " in diff


def test_a_policy_keeps_its_settings(folder):
    path = written(folder, "import jax\ng = jax.grad(f)\n")
    policy = 'mixed_bfloat16,overrides={"*head*": "f32"}'
    applied(proposed(uses_in(path), policy))
    call = ast.parse(path.read_text()).body[-1].value.args[0]
    assert ast.literal_eval(call.args[1]) == policy


# What is not known


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("grads, opt_state, params)", "None, opt_state, params)", "no update .* reads these grad"),
        ("jax.value_and_grad(loss_fn)(params, x, y)", "jax.vjp(loss_fn, params, x, y)", "no loss"),
        ("jax.value_and_grad(loss_fn)", "scale.value_and_grad(loss_fn)", "a method, perhaps of a"),
        ("jax.value_and_grad(loss_fn)", "jax.value_and_grad(loss_fn, holomorphic=True)", "option"),
        ("value_and_grad(loss_fn)", "value_and_grad(loss_fn, **more)", r"the option \*\*,"),
        ("= optax.adamw(1e-2)", "= elsewhere(1e-2)", "optimizer.init"),
        ("    updates", "    opt_state = new(opt_state)\n    updates", "changes before the update"),
        ("losses = []", "rate = opt_state.hyperparams", "opt_state.inner_state of a wrapped"),
        ("loss, grads =", "return", "no update of an optimizer"),
        ("    updates", "    other.update(grads, opt_state)\n    updates", "several updates"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_said(folder, old, new, said):
    path = written(folder, OPTAX.replace(old, new).replace("import optax", "from my import optax"))
    proposal = proposed([Use(str(path), 20, "value_and_grad", "loss_fn")], "mixed_float16")
    if said == "optimizer.init":  # its use shows that it is an optimizer
        assert "mpjax.mixed_precision(elsewhere(1e-2), " in proposal.diff
        path.write_text(path.read_text().replace("optimizer.init", "init"))
        proposal, said = proposed(uses_in(path), "mixed_float16"), "where optimizer is created"
    assert not proposal.diff and len(proposal.missing) == 1, proposal
    assert re.match(rf"{path.name}|.*train.py:20: .*{said}.*docs/", proposal.missing[0])


GAN = """import jax, optax
g_tx = optax.adam(1e-3)
d_tx = optax.chain(optax.clip(1.0), optax.adam(1e-3))
d_tx = optax.chain(d_tx, optax.scale(2.0))
def step(gp, dp, gs, ds, x):
    gl, gg = jax.value_and_grad(gloss)(gp, dp, x)
    dl, dg = jax.value_and_grad(dloss, argnums=1)(gp, dp, x)
    u, gs = g_tx.update(gg, gs, gp); gp = optax.apply_updates(gp, u)
    u, ds = d_tx.update(dg, ds, dp); dp = optax.apply_updates(dp, u)
    return gp, dp, gs, ds
"""
BRANCHES = """import jax, optax
def main(config):
    if config.adam:
        tx = optax.adam(1e-3)
    else:
        tx = optax.sgd(1e-3)
    state = {"opt": tx.init(params)}
    return make(loss, tx, state)
def make(loss, tx, state):
    if scale:
        gradient = scale.value_and_grad(loss)
        scale, finite, value, grads = gradient(params)
        state = state | {"scale": scale}
    else:
        gradient = jax.value_and_grad(loss)
        value, grads = gradient(params)
    metrics.update(value=value)
    grads, norm = clip(grads)
    updates, state["opt"] = tx.update(grads, state["opt"], params)
"""
BODY = """import jax, optax
def fit(params, x, n):
    solver = optax.adam(1e-3)
    def body(i, carry):
        params, opt_state = carry
        grads = jax.grad(loss)(params, x)
        updates, opt_state = solver.update(grads, state=opt_state, params=params)
        return optax.apply_updates(params, updates), opt_state
    return jax.lax.fori_loop(0, n, body, (params, solver.init(params)))
"""


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (GAN, ["g_tx = MIX(optax.adam(1e-3), P)",
               "d_tx = MIX(optax.chain(d_tx, optax.scale(2.0)), P)",
               "gl, gg = g_tx.value_and_grad(gloss, gs)(gp, dp, x)",
               "dl, dg = d_tx.value_and_grad(dloss, ds, argnums=1)(gp, dp, x)"]),
        (BRANCHES, ["tx = MIX(optax.adam(1e-3), P)", "tx = MIX(optax.sgd(1e-3), P)",
                    'gradient = tx.value_and_grad(loss, state["opt"])']),
        (BODY, ["solver = MIX(optax.adam(1e-3), P)",
                "grads = solver.value_and_grad(loss, opt_state)(params, x)[1]"]),
    ],
    ids=["gan", "branches", "body"],
)  # fmt: skip
def test_names_are_followed(folder, text, lines):
    proposal = proposed(uses_in(written(folder, text)), "mixed_float16")
    code = "\n".join(added(proposal)).replace('"mixed_float16"', "P")
    assert code.replace("mpjax.mixed_precision", "MIX").split("\n") == lines, proposal


def test_gradients_of_a_closed_over_state_are_not_taken_through_it(folder):
    """A jitted function would keep the loss scale of the first step."""
    text = """import jax, optax
def main(params):
    tx = optax.adam(1e-2)
    opt_state = tx.init(params)
    @jax.jit
    def gradients(params):
        return jax.grad(loss)(params)
    while True:
        grads = gradients(params)
        updates, opt_state = tx.update(grads, opt_state)
"""
    proposal = proposed(uses_in(written(folder, text)), "mixed_float16")
    assert not proposal.diff and "no update of an optimizer" in proposal.missing[0]


def test_policies_and_files_that_are_not_edited(folder):
    path = written(folder, OPTAX)
    for policy, said in (("O2:bfloat16", "stores parameters"), ("float32", "nothing to change")):
        proposal = proposed(uses_in(path), policy)
        assert not proposal.diff and said in proposal.missing[0]
    library = jnp.__file__
    uses = [Use(library, 1, "grad", "f"), Use(str(folder / "x.ipynb"), 2, "grad", "f")]
    latin = written(folder, "# coding: latin-1\n# ü\n".encode("latin-1"), "latin.py")
    uses += [Use(str(latin), 1, "grad", "f"), Use("<stdin>", 3, "grad", "f")]
    uses += [Use(str(path), 20, "grad", "f"), Use(str(path), 1, "grad", "solved")]
    proposal = proposed(uses, "mixed_bfloat16")
    assert len(added(proposal)) == 1
    installed, notebook, latin, typed, solved = proposal.missing
    assert "numpy/__init__.py:1: grad is called in an installed" in installed
    assert "docs/libraries.md" in installed and "no file of Python code" in notebook
    assert "latin.py:1: " in latin and "UTF-8" in latin and "<stdin>:3: " in typed
    assert "of solved. If a library" in solved and "docs/libraries.md" in solved


def test_moments_in_8_bits_need_the_optimizer(folder):
    path = written(folder, OPTAX)
    proposal = proposed(uses_in(path), "mixed_bfloat16,moments=8bit")
    assert 'mpjax.mixed_precision(optax.adamw(1e-2), "mixed_bfloat16,moments=8bit")' in (
        proposal.diff
    )


# Our own loops


def test_examples_are_left_alone():
    for path in (ROOT / "examples").glob("*.py"):
        source = Source(path)
        uses = [use for use in uses_in(path) if path.stem != "wgan_gp"]
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("value_and_grad"):
                uses.append(Use(str(path), node.func.lineno, "value_and_grad", "loss_fn"))
        assert not proposed(uses, "mixed_float16").diff, path


UNDONE = [  # the lines marked "changed", and what they were
    (r"(?:optimizer|state)\.value_and_grad\(loss_fn(?:, opt_state)?", "LIB(loss_fn"),
    (r"mpjax\.nnx\.value_and_grad\(loss_fn, optimizer\)", "nnx.value_and_grad(loss_fn)"),
    (r"mpjax\.mixed_precision\((.*), \"mixed_float16\"\)", r"\1"),
    (r"mpjax\.nnx\.Optimizer\(model, tx, policy, ", "nnx.Optimizer(model, tx, "),
    (r"from mpjax.linen import", "from flax.training.train_state import"),
    (r"tx=tx, policy=policy\)", "tx=tx)"),
    (r", mpjax(?:\.nnx)?", ""),
]


@pytest.mark.parametrize("tab", ["optax", "Flax NNX", "Flax linen", "Equinox", "Haiku"])
def test_the_page_of_frameworks_shows_the_same_lines(folder, tab):
    page = (ROOT / "docs" / "frameworks.md").read_text()
    code = re.search(rf":::{{tab-item}} {tab}\n```python\n(.*?)```", page, re.DOTALL)[1]
    code = re.sub(r"  # changed.*", "", code)
    library = "eqx.filter_value_and_grad" if tab == "Equinox" else "jax.value_and_grad"
    before = code
    for new, old in UNDONE:
        before = re.sub(new, old.replace("LIB", library), before)
    lines = [line for line in before.splitlines() if not re.search("# bfloat16:|select", line)]
    path = written(folder, "\n".join(lines) + "\n")
    applied(proposed(uses_in(path), "mixed_float16"))
    wanted = {
        line.strip() for line in code.splitlines() if re.search(r"value_and_grad\(loss", line)
    }
    wanted = {line for line in wanted if "# bfloat16:" not in line}
    assert wanted and wanted <= {line.strip() for line in path.read_text().splitlines()}
    path.write_text("\n".join(lines) + "\n")
    applied(proposed(uses_in(path), "mixed_bfloat16"))
    wrapped = re.search(r"# bfloat16: (.*)", code)[1].split("(model")[0].split("(params")[0]
    assert wrapped.split("(state.")[0] in path.read_text()
