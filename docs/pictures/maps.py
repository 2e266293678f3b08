"""Takes the pictures of the HTML maps of GPT-2 124M.

python docs/pictures/maps.py pages FOLDER     writes the pages (needs mpjax[aot,html])
python docs/pictures/maps.py pictures FOLDER  opens them in Chromium (needs playwright)
"""

import sys
from pathlib import Path

import jax

import mpjax

PICTURES = Path(__file__).parent
ROOT = PICTURES.parents[1]
sys.path.append(str(ROOT))


def pages(folder):
    """Writes the pages of explain and compile_for."""
    from benchmarks import aot, models

    aot.on_the_cpu()
    loss, params, rest, batch, optimizer = models.MODELS["gpt2"]()
    explained = mpjax.explain(loss, "mixed_bfloat16", argnums=0, has_aux=True)(params, rest, batch)
    (folder / "map_explain.html").write_text(explained.to_html("GPT-2 124M"))
    state = params, rest, jax.eval_shape(optimizer.init, params)
    step = models.training_step(mpjax.autocast(loss, "mixed_bfloat16"), optimizer)
    report = mpjax.compile_for("h100", jax.jit(step, donate_argnums=0), state, batch, timeout=1500)
    page = report.to_html("GPT-2 124M, a training step on one H100")
    (folder / "map_compile.html").write_text(page)


def pictures(folder):
    """Takes the pictures: a matmul that a search found, and memory by kind."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            args=["--no-sandbox"], executable_path=sys.argv[3] if sys.argv[3:] else None
        )

        def opened(name, height):
            page = browser.new_page(viewport={"width": 1280, "height": height})
            page.goto((folder / f"{name}.html").resolve().as_uri())
            return page

        page = opened("map_explain", 900)
        page.fill("#search", "dot_general")
        page.press("#search", "Enter")
        page.locator(".map h2").evaluate("found => found.scrollIntoView()")
        page.screenshot(path=PICTURES / "map_explain.png")

        page = opened("map_compile", 1150)
        page.get_by_label("kind", exact=True).check()
        page.locator(".tile:visible", has_text="reduce_sum").first.click()
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=PICTURES / "map_compile.png")
        browser.close()


if __name__ == "__main__":
    {"pages": pages, "pictures": pictures}[sys.argv[1]](Path(sys.argv[2]))
