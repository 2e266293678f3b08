"""Pages in a real browser: what is found, what keys do, who can read it, what user text may not."""

import jax
import jax.numpy as jnp
import optax
import pytest
from absent import report as compile_report
from axe_playwright_python.sync_playwright import Axe
from flax import linen as nn
from support import thorough_but

import mpjax
from mpjax._src.tools.hardware.memory import by_kind
from mpjax._src.tools.hardware.report import report_of
from mpjax._src.tools.hardware.targets import find_target

HOSTILE = "<script>alert(1)</script>"
SEARCH = """texts => texts.map(text => {
  const box = document.getElementById("search");
  box.value = text;
  box.dispatchEvent(new Event("input"));
  return document.getElementById("hits").textContent;
})"""


class Model(nn.Module):
    """Alike layers, and a scope that would be a script if it were not escaped."""

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(name="norm")(x)
        for i in range(3):
            x = nn.Dense(8, name=f"dense_{i}")(x)
        with jax.named_scope(HOSTILE):
            return jnp.tanh(x @ x.T)


X = jax.random.normal(jax.random.key(0), (4, 8))
PARAMS = Model().init(jax.random.key(1), X)


def loss(params, x):
    return jnp.sum(Model().apply(params, x)) * 0.01


@pytest.fixture(scope="module")
def explained():
    return mpjax.explain(loss, "mixed_bfloat16", 0)(PARAMS, X)


@pytest.fixture(scope="module")
def compared():
    return mpjax.compare(loss, "mixed_bfloat16")(PARAMS, X)


def hits(page, *texts):
    """Returns how many operations the page finds for each text."""
    return [int(found.split()[0]) for found in page.evaluate(SEARCH, list(texts))]


def test_every_operation_is_found_and_counts_are_the_reports(opened, explained):
    page = opened(explained.to_html())
    rows = explained.rows
    assert page.locator("#hits").inner_text() == f"{len(rows)} operations"
    assert hits(page, *(f"#{i}" for i in range(len(rows)))) == [1] * len(rows)
    for name in ("primitive", "scope", "reason", "path"):
        for text in sorted({getattr(row, name) for row in rows} - {""}):
            least = sum(getattr(row, name) == text for row in rows)
            assert hits(page, text)[0] >= least, (name, text)
    assert hits(page, "backward of row")[0] == sum(row.backward for row in rows)
    assert hits(page, "no such thing anywhere") == [0]
    for label, dtype in (("float32", "f32"), ("bfloat16", "bf16")):
        told = page.locator("#legend0 li", has_text=label).locator(".count").inner_text()
        assert int(told) == sum(cells[dtype] for cells in explained.calls().values())


def test_all_tiles_are_there_once_in_the_boxes_of_their_scopes(opened, explained):
    page = opened(explained.to_html())
    page.get_by_role("button", name="Open all").click()
    tiles = page.evaluate(
        """() => [...document.querySelectorAll(".tile")].map(tile => {
          const names = [];
          for (let e = tile.closest(".box"); e; e = e.parentElement.closest(".box"))
            names.unshift(e.querySelector(".name").textContent);
          return [tile.getAttribute("aria-label"), names.join("/")];
        })"""
    )
    wanted = {f"{row.primitive}, row {i}": row.scope for i, row in enumerate(explained.rows)}
    found = dict(tiles)
    assert len(tiles) == len(wanted) and {*found} == {*wanted}
    assert any(wanted.values())
    assert all(found[name] == scope for name, scope in wanted.items() if scope)
    assert page.locator(".sum", has_text="like dense_").count()


def test_a_click_tells_line_code_and_reason(opened, explained):
    page = opened(explained.to_html())
    index, row = next((i, r) for i, r in enumerate(explained.rows) if r.path and r.flops)
    page.fill("#search", f"#{index}")
    page.press("#search", "Enter")
    detail = page.locator("#detail")
    text = detail.inner_text()
    assert f"{row.primitive} (row {index})" in text and row.reason in text
    assert "test_browser.py:" in text and 'nn.Dense(8, name=f"dense_{i}")' in text
    assert row.scope in text and row.path in text
    behind = next(i for i, r in enumerate(explained.rows) if r.forward == index)
    page.fill("#search", f"#{behind}")
    page.press("#search", "Enter")
    detail.get_by_role("button", name=f"row {index}").click()
    assert f"(row {index})" in detail.inner_text()
    page.keyboard.press("Escape")
    assert "Click a tile to see" in detail.inner_text()


def test_the_keyboard_reaches_everything(opened, explained):
    page = opened(explained.to_html())
    focused = "document.activeElement.getAttribute('aria-label') || document.activeElement.id"
    page.focus("#close")
    page.keyboard.press("Enter")  # closes all boxes
    assert (
        page.locator(".tile:visible").count()
        == sum("/" not in row.scope and not row.scope for row in explained.rows) * 0
        + page.locator("#tree > .tiles .tile").count()
    )
    page.keyboard.press("Tab")
    assert "operations" in page.evaluate(focused)  # the first box, one stop for all of the tree
    box = page.evaluate_handle("document.activeElement")
    assert box.get_attribute("aria-expanded") == "false"
    page.keyboard.press("Enter")
    assert box.get_attribute("aria-expanded") == "true"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) != box.get_attribute("aria-label")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("End")
    last = page.evaluate(focused)
    page.keyboard.press("Home")
    assert page.evaluate(focused) == box.get_attribute("aria-label") != last
    for _ in range(400):  # down to the first tile
        if page.evaluate("document.activeElement.matches('.tile')"):
            break
        page.keyboard.press("ArrowRight")
    name = page.evaluate(focused)
    page.keyboard.press("Enter")
    assert page.locator("#detail h3").inner_text().split(" ")[0] == name.split(",")[0]
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('#tree')") is None


def test_page_colors_switch_and_show_amounts(opened, compared):
    page = opened(compared.to_html())
    names = page.locator("#controls label").all_inner_texts()
    assert {"added error", "error", "dtype", "bytes"} <= {*names}
    for index, name in enumerate(n for n in names if n != "Search"):
        page.get_by_label(name, exact=True).check()
        legend = page.locator(f"#legend{index}")
        counts = legend.locator(".count").all_inner_texts()
        assert legend.is_visible() and sum(map(int, counts)) == len(compared.rows)
        assert page.locator(".legend:visible").count() == 1
    page.get_by_label("bytes", exact=True).check()
    assert "iB" in page.locator(".sum").first.inner_text()


def test_memory_is_told_by_kind_as_a_bar_and_on_the_map(opened):
    init, step = mpjax.build_train_step(loss, optax.adam(1e-3), "mixed_bfloat16")
    compiled = jax.jit(step).lower(init(PARAMS), X).compile()
    stats = compiled.memory_analysis()
    found = report_of(
        find_target("h100"),
        {
            "memory": {
                "arguments": stats.argument_size_in_bytes,
                "outputs": stats.output_size_in_bytes,
                "aliased": stats.alias_size_in_bytes,
                "temporary": stats.temp_size_in_bytes,
                "code": 0,
            },
            "asked": compiled.as_text(),
            "hlo": compiled.as_text(),
            "xla_costs": {},
        },
    )
    page = opened(found.to_html())
    kinds = page.locator("section", has=page.locator("#bar1")).locator("li").all_inner_texts()
    told = [
        kind for kind in by_kind(found.memory()) if any(text.startswith(kind) for text in kinds)
    ]
    assert len(told) == len(kinds) >= 4 and {"parameters", "moments"} <= {*told}
    page.get_by_label("kind", exact=True).check()
    tiles = page.locator("#legend2 li", has_text="moments").locator(".count").inner_text()
    assert int(tiles) == 2 * len(jax.tree.leaves(PARAMS))
    assert hits(page, "opt_state mu kernel")[0] == 3
    page.press("#search", "Enter")
    assert "moments" in page.locator("#detail").inner_text()


def test_text_of_user_code_is_text(opened, explained, compared):
    for report in (explained, compared):
        assert any(HOSTILE.split("/")[0] in row.scope for row in report.rows)
        page = opened(report.to_html(title=HOSTILE))
        assert page.title() == HOSTILE
        assert page.locator("script").count() == 2  # its data and its own
        page.get_by_role("button", name="Open all").click()
        assert page.locator(".name", has_text="<script>").count()
        page.fill("#search", "<script>")
        page.press("#search", "Enter")
        assert "<script>" in page.locator("#detail").inner_text()


@pytest.mark.parametrize(
    ("scheme", "width"), thorough_but([("light", 400), ("dark", 1300)], ("light", 400))
)
def test_axe_finds_nothing_serious(opened, explained, compared, scheme, width):
    for report in (explained, compared):
        screen = {"width": width, "height": 800}
        page = opened(report.to_html(), color_scheme=scheme, viewport=screen)
        page.get_by_role("button", name="Open all").click()
        page.locator("input[name=color]").nth(1).check()
        page.fill("#search", "dot_general")
        page.locator(".tile").first.click()
        found = Axe().run(page).response["violations"]
        serious = [v for v in found if v["impact"] in ("serious", "critical")]
        assert not serious, [(v["id"], v["nodes"][0]["html"][:300]) for v in serious]
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(overflow) <= 0
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(255, 255, 255)") == (scheme == "light")


def small(w, x):
    with jax.named_scope("product"):
        return jnp.sum((x @ w) ** 2)


W = PARAMS["params"]["dense_0"]["kernel"]

OTHERS = {
    "find_nonfinite": lambda: mpjax.find_nonfinite(small, "mixed_float16")(W, X * 1e6),
    "nothing found": lambda: mpjax.find_nonfinite(small)(W, X),
    "gradient_histogram": lambda: mpjax.debug.gradient_histogram(PARAMS),
    "no gradients": lambda: mpjax.debug.gradient_histogram(jax.tree.map(jnp.zeros_like, PARAMS)),
    "tune": lambda: mpjax.debug.tune(small, "mixed_bfloat16", 1e-4, max_runs=9)(W, X),
    "device_report": mpjax.hardware.device_report,
    "compile_for": lambda: compile_report("h100", "stack"),
}


@pytest.mark.parametrize("name", thorough_but(OTHERS, "find_nonfinite"))
def test_every_other_report_opens_as_a_page(opened, name):
    report = OTHERS[name]()
    page = opened(report.to_html(), color_scheme="dark", viewport={"width": 700, "height": 700})
    assert str(report).splitlines()[0].strip() in page.locator("pre").inner_text()
    if page.locator(".tile").count():
        page.get_by_role("button", name="Open all").click()
        page.locator(".tile").last.click()
        assert page.locator("#detail dt").count() >= 2
    found = Axe().run(page).response["violations"]
    serious = [v for v in found if v["impact"] in ("serious", "critical")]
    assert not serious, [(v["id"], v["nodes"][0]["html"][:300]) for v in serious]
    drawn = {"find_nonfinite": 1, "gradient_histogram": len(jax.tree.leaves(PARAMS))}
    assert page.locator(".tile").count() == drawn.get(name, page.locator(".tile").count())
    assert page.locator(".histogram").count() == (name == "gradient_histogram")


def test_a_notebook_gets_a_frame_of_its_own(opened, explained):
    page = opened(f"<!doctype html><title>notebook</title>{explained._repr_html_()}")
    frame = page.frame_locator("iframe")
    assert frame.locator("#hits").inner_text() == f"{len(explained.rows)} operations"
    frame.locator(".tile").first.click()
    assert "why" in frame.locator("#detail").inner_text()
    assert page.evaluate("document.querySelector('iframe').contentDocument") is None


def test_without_a_script_the_page_still_tells(opened, explained):
    page = opened(explained.to_html(), java_script_enabled=False)
    text = page.locator("body").inner_text()
    assert "turned off" in text and "dot_general" in text and "of matmul FLOPs" in text
