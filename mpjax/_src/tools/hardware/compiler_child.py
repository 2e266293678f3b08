"""The child process that compiles for targets; `compiler` starts it.

It reads a request as JSON from a connection and writes its answer, and ends when the parent does.
While it compiles it may ask the parent a question and wait for the answer.
"""

import json
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def main() -> None:
    """Answers a request. The last two arguments are the parent's id and a file descriptor."""
    os.dup2(2, 1)  # the compiler's output goes to stderr
    connection = Connection(int(sys.argv[-1]))
    threading.Thread(target=_end_with, args=(int(sys.argv[-2]),), daemon=True).start()

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        connection.send_bytes(json.dumps({"question": question}).encode())
        return json.loads(connection.recv_bytes())

    from mpjax._src.core.base import _jax

    _jax.ask_elsewhere(ask)
    request = json.loads(connection.recv_bytes())
    # Only a signal can end a compiler that hangs.
    signal.alarm(int(request.pop("timeout")) + 10)
    request["program"] = Path(request["program"]).read_bytes()
    try:
        answer = _jax.compile_only(**request)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    connection.send_bytes(json.dumps(answer).encode())


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended."""
    # A parent that is killed says nothing, but its children then have another one.
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
