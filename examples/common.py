"""Code that the examples share: command line, data and results, but no mixed precision.

An example has a docstring with a table of expected figures, a dictionary of sizes, and a function
that trains. `main` makes a program from these three:

    python examples/resnet18.py --size small --policy mixed_float16 --seed 0 --out result.json

Every setting of a size is also an option (`--steps 1000`). `expected.py` runs all rows of a table.
"""

import argparse
import json
import math
import pydoc_data.topics
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

POINTS = 200  # of a curve, in a result
SPREAD = "spread"  # the last row of a table: float32's range over seeds


def main(doc: str, sizes: dict[str, dict[str, Any]], train: Callable[..., Any], argv=None) -> Any:
    """Reads the command line, trains, prints the figures, and returns and writes the result."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sizes, default="small")
    parser.add_argument("--policy", default=list(expected(doc))[1].split()[0])
    parser.add_argument("--loss-scale", type=name_or_number, default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="a folder of your own data")
    parser.add_argument("--out", type=Path, help="where to write figures and curves, as JSON")
    for name, value in sizes["small"].items():
        parser.add_argument(f"--{name}", type=type(value))
    args = vars(parser.parse_args(argv))
    settings = {name: args[name] if args[name] is not None else value
                for name, value in sizes[args["size"]].items()}  # fmt: skip
    start = time.perf_counter()
    result = train(SimpleNamespace(**{**args, **settings}))
    curves = {name: thinned(jax.device_get(curve)) for name, curve in result["curves"].items()}
    result = {
        **{name: args[name] for name in ("size", "policy", "loss_scale", "seed")},
        **settings,
        "figures": {name: float(value) for name, value in result["figures"].items()},
        "skipped": int(result.get("skipped", 0)),
        "curves": curves,
        "seconds": round(time.perf_counter() - start, 1),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    told = ", ".join(f"{name} {value:.5g}" for name, value in result["figures"].items())
    told += f", {result['skipped']} steps skipped, {result['seconds']} s"
    print(f"{args['policy']}: {told}")
    if args["out"]:
        args["out"].parent.mkdir(parents=True, exist_ok=True)
        args["out"].write_text(json.dumps(result))
    return result


def expected(doc: str) -> dict[str, dict[str, float]]:
    """Reads the table at the top of an example: from a row's name to its figures."""
    lines = iter(doc.splitlines())
    cells = lambda line: re.split(r"\s{2,}", line.strip())  # noqa: E731
    columns = next(cells(line)[1:] for line in lines if line.startswith("    policy "))
    table = {}
    for line in iter(lambda: next(lines, ""), ""):
        row, *figures = cells(line)
        table[row] = dict(zip(columns, map(float, figures), strict=True))
    return table


def name_or_number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def steps(count: int) -> Iterator[int]:
    """Counts steps, with a progress bar on a terminal."""
    return iter(tqdm(range(count), unit="step", disable=None))


def thinned(curve: Any) -> list[float | str]:
    """Returns a curve of at most `POINTS` points, each the mean of a stretch."""
    curve = np.asarray(curve, np.float64).reshape(len(curve))
    means = [float(part.mean()) for part in np.array_split(curve, min(len(curve), POINTS))]
    return [float(f"{mean:.4g}") if math.isfinite(mean) else str(mean) for mean in means]


def batches(data: Any, batch: int, seed: int) -> Iterator[Any]:
    """Yields random batches forever, from a list of arrays or, through grain, from a source."""
    if isinstance(data, list):
        rng = np.random.default_rng(seed)
        while True:
            rows = rng.choice(len(data[0]), batch, replace=batch > len(data[0]))
            yield [array[rows] for array in data]
    grain = optional("grain")
    yield from grain.MapDataset.source(data).shuffle(seed).repeat().batch(batch).to_iter_dataset()


def windows(text: np.ndarray, length: int) -> Any:
    """Returns all windows of a text as rows of an array, without a copy."""
    return np.lib.stride_tricks.sliding_window_view(text, length)


def read_text(folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns a text's bytes and its held-out last tenth, from Python's help topics or files."""
    if folder:
        text = b"\n\n".join(path.read_bytes() for path in sorted(folder.rglob("*.txt")))
    else:
        topics = pydoc_data.topics.topics
        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = np.frombuffer(text, np.uint8)
    first, last = np.split(data, [len(data) * 9 // 10])
    return first, last


def read_digits() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the digits, [images, labels], of the first half of the writers and of the second."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    arrays = [(digits.images[..., None] / 16).astype(np.float32), digits.target.astype(np.int32)]
    half = len(digits.target) // 2
    return [array[:half] for array in arrays], [array[half:] for array in arrays]


class Images:
    """The images of a folder with one folder per class; decoded when they are read."""

    def __init__(self, paths: list[Path], side: int):
        self.paths, self.side = paths, side
        self.classes = sorted({path.parent.name for path in paths})

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> list[np.ndarray]:
        from PIL import Image, ImageOps

        path = self.paths[index]
        with Image.open(path) as image:
            image = ImageOps.fit(image.convert("RGB"), (self.side, self.side))
        label = np.int32(self.classes.index(path.parent.name))
        return [np.asarray(image, np.float32) / 255, label]


def read_images(folder: Path | None, side: int) -> tuple[Any, list[np.ndarray]]:
    """Returns training and held-out [images, labels]: digits, or the images of a folder."""
    if not folder:
        return read_digits()
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".png", ".jpg", ".jpeg"))
    order = np.random.default_rng(0).permutation(len(found))
    images = Images([found[i] for i in order], side)
    held_out = min(1000, len(images) // 10)
    last = [images[i] for i in range(len(images) - held_out, len(images))]
    images.paths = images.paths[: len(images) - held_out]
    return images, [np.stack(arrays) for arrays in zip(*last, strict=True)]


def frechet(first, second):
    """Returns Frechet's distance of two sets of arrays, taken as normally distributed."""
    first, second = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (first, second))
    means = np.sum((first.mean(0) - second.mean(0)) ** 2)
    one, other = np.cov(first.T), np.cov(second.T)
    between = np.sqrt(np.linalg.eigvals(one @ other).real.clip(0)).sum()  # the root's trace
    return means + np.trace(one) + np.trace(other) - 2 * between


def optional(name: str) -> Any:
    """Imports a library that only some examples need."""
    try:
        return __import__(name)
    except ImportError as error:
        raise SystemExit(f"This needs {name}: pip install {name}") from error
