"""A run that is killed at random moments, also inside a save, loses nothing that was saved.

KILLS says how often it is killed; `make soak` kills it 200 times.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import resumed
from problems import bits
from support import seed_of_run

from mpjax import checkpoint

pytestmark = pytest.mark.thorough
KILLS = int(os.environ.get("KILLS", 5))
SCRIPT = Path(resumed.__file__)
# Of what orbax, JAX and absl say on the way nothing is of interest.
RUN = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}


def started(directory, steps):
    """Starts the run in a process of its own, and returns it when its first step is done."""
    path = os.pathsep.join((str(SCRIPT.parent.parent), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen([sys.executable, SCRIPT, directory, str(steps)], env=env, **RUN)
    assert process.stdout.readline() == "training\n"
    return process


class Expected:
    """The run that is never stopped, as far as it was asked for."""

    def __init__(self):
        start, self.step, self.batch = resumed.program()
        self.state, self.number = start(), 0

    def at(self, number):
        while self.number < number:
            self.state, _ = self.step(self.state, self.batch(self.number))
            self.number += 1
        assert self.number == number, "numbers only grow"
        return bits(self.state)


def test_no_kill_damages_the_last_good_checkpoint(tmp_path):
    draw, expected, last = random.Random(seed_of_run()), Expected(), 0
    start, _, _ = resumed.program()
    for _ in range(KILLS):
        process = started(tmp_path / "run", 10**6)
        time.sleep(draw.uniform(0, 1.0))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        # As another process sees it, which removes nothing.
        numbers = sorted(int(p.name) for p in (tmp_path / "run").iterdir() if p.name.isdigit())
        assert max(numbers, default=0) >= last, (numbers, last)
        for number in numbers:
            back = checkpoint.restore(tmp_path / "run" / str(number), like=start())
            if number >= expected.number:
                assert bits(back) == expected.at(number)
        last = max([last, *numbers])
        print(f"killed after {last}, with {numbers}")
    end = bits(resumed.run(tmp_path / "run", last + 3))
    assert end == expected.at(last + 3)
    assert not [p for p in (tmp_path / "run").iterdir() if "tmp" in p.name]


def test_sigterm_ends_a_run_with_its_last_step_saved(tmp_path):
    process = started(tmp_path / "run", 10**6)
    while not [p for p in tmp_path.glob("run/*") if p.name.isdigit()]:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0
    last = max(int(p.name) for p in (tmp_path / "run").iterdir() if p.name.isdigit())
    start, _, _ = resumed.program()
    back = checkpoint.restore(tmp_path / "run" / str(last), like=start())
    assert bits(back) == Expected().at(last)
    assert int(jax.device_get(back.step)) + int(back.skipped_steps) == last


REMOVE = """
import os, shutil, signal, sys
from pathlib import Path
import numpy as np
from mpjax import checkpoint

state, left = {"params": {"w": np.arange(3.0, dtype=np.float32)}}, int(sys.argv[2])

def killed(path, *args, **kwargs):
    global left
    for file in sorted(p for p in Path(path).rglob("*") if p.is_file()):
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        file.unlink()
        left -= 1
    remove(path, *args, **kwargs)

remove, shutil.rmtree = shutil.rmtree, killed
with checkpoint.Manager(sys.argv[1], keep=1) as manager:
    for number in range(9):
        manager.save(number, state)
"""


@pytest.mark.parametrize("files", [0, 1, 3, 8, 20])
def test_a_kill_while_an_old_checkpoint_is_removed_leaves_nothing_that_is_listed(files, tmp_path):
    run = subprocess.run([sys.executable, "-c", REMOVE, tmp_path / "run", str(files)], check=False)
    assert run.returncode == -signal.SIGKILL
    rests = [*tmp_path.glob("run/*.removed.orbax-checkpoint-tmp")]
    assert len(rests) == 1
    state = {"params": {"w": np.arange(3.0, dtype=np.float32)}}
    for _ in range(2):
        with checkpoint.Manager(tmp_path / "run", read_only=True) as manager:
            numbers = manager.steps()
            assert numbers and all(bits(manager.restore(state, n)) == bits(state) for n in numbers)
    with checkpoint.Manager(tmp_path / "run", keep=1) as manager:
        assert manager.steps() == numbers
        manager.save(100, state)
        assert manager.steps() == [100]
    assert [p.name for p in tmp_path.glob("run/*")] == ["100"]
