"""Runs one process of examples/multihost.py and prints what it holds at the end. Tests start it.

python tests/helpers/launched.py OPTIONS, which are the options of the example.
"""

import hashlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import multihost


def digest(state):
    """Returns a hash of a state: this process's copies, and the parts of other processes."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        if leaf.is_fully_replicated:
            copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            assert len({copy.tobytes() for copy in copies}) == 1
            found.update(copies[0].tobytes())
        elif leaf.is_fully_addressable:
            found.update(np.asarray(leaf).tobytes())
        else:
            found.update(multihost_utils.process_allgather(leaf, tiled=True).tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    state, metrics = multihost.main(sys.argv[1:], standalone_mode=False)
    end = {name: float(metrics[name]) for name in ("loss", "loss_scale", "skipped_steps")}
    end |= {"digest": digest(state), "digest of params": digest(state.params)}
    end["steps"] = int(state.step)
    print("end", json.dumps(end), flush=True)
