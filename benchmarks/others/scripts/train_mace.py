"""Trains MACE on molecules of its own data with its own smoke test: train_mace.py CHECKOUT

A small model: the sizes are bindings of its configuration.
"""

import runpy
import sys
from pathlib import Path

checkout = Path(sys.argv[1])
lines = (checkout / "data" / "3bpa_train_300K.xyz").read_text().splitlines(keepends=True)
frame = 2 + int(lines[0])  # molecules of one size, each behind two lines
Path("train.xyz").write_text("".join(lines[: 8 * frame]))
settings = (checkout / "configs" / "aspirin_small.gin").read_text()
for old, new in (
    ('"32x0e"', '"8x0e"'),
    ("max_ell = 3", "max_ell = 1"),
    ("correlation = 3", "correlation = 2"),
):
    settings = settings.replace(old, new)
Path("small.gin").write_text(settings)
script = str(checkout / "scripts" / "run_aspirin_smoke_test.py")
args = ["--config", "small.gin", "--train-path", "train.xyz", "--valid-path", "train.xyz"]
sys.argv[:] = [script, *args, "--max-epochs", "2", "--batch-max-edges", "1500", "--log-dir", "logs"]
runpy.run_path(script, run_name="__main__")
