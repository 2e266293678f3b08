"""The process that compiles for hardware that is not there; `compiler` starts it.

Reads JSON requests from a connection, writes JSON answers, ends when the other side does. While it
compiles it may ask a question, which is answered before it goes on.
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
    """Answers requests on a file descriptor. The last two arguments: who asks, and where."""
    os.dup2(2, 1)  # nobody reads what a compiler prints
    connection = Connection(int(sys.argv[-1]))
    threading.Thread(target=_end_with, args=(int(sys.argv[-2]),), daemon=True).start()

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        connection.send_bytes(json.dumps({"question": question}).encode())
        return json.loads(connection.recv_bytes())

    from mpjax._src import _jax

    _jax.ask_elsewhere(ask)
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        # A compiler that hangs listens to nothing but this.
        signal.alarm(int(request["timeout"]) + 10)
        connection.send_bytes(json.dumps(_answer(request)).encode())
        signal.alarm(0)


def _end_with(parent: int) -> None:
    """Ends this process when the one that asks is gone, killed perhaps: nobody wants the answer."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from mpjax._src import _jax

    program = Path(request["program"]).read_bytes()
    try:
        return _jax.compile_only(
            request["platform"],
            request["topology"],
            request["config"],
            request["devices"],
            program,
            request["options"],
        )
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
