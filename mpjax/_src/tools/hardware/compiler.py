"""Starts the child process that runs the compilers of targets, and words their errors."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from mpjax._src.core.base.errors import CompileError, OutOfMemoryError
from mpjax._src.core.base.progress import still_running
from mpjax._src.tools.hardware.targets import Target

# XLA's flags for one compilation, by name.
Options = dict[str, Any]
# What answers a question that the compiler asks while it compiles.
Answer = Callable[[dict[str, Any]], dict[str, Any]]

# What the child must not inherit: flags for other compilers, and settings that choose devices.
DROPPED = (
    *("XLA_", "LIBTPU_", "TPU_", "JAX_", "PJRT_"),
    *("CUDA_VISIBLE", "PYTHONWARN", "PYTHONINSPECT"),
)
# The compilers need no device, and must not wait for one, nor for a cloud's metadata server.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mpjax._src.tools.hardware.compiler_child import main; main()"
)

CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
NVCC = ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc")

# The first pattern that matches counts, so special cases come before general ones.
ADVICE = (
    (
        r"ptxas too old",
        "CUDA 13 begins with Turing, so it is not for a V100: install jax-cuda12-plugin and "
        "nvidia-cuda-nvcc-cu12 instead.",
    ),
    (r"libdevice|ptxas", "Install the CUDA compiler: pip install nvidia-cuda-nvcc-cu12."),
    (
        r"Unsupported algorithm.*BF16|bf16.*not supported",
        "The GPU has no bfloat16 units: compute in float16 (policy='mixed_float16').",
    ),
    (r"Unsupported algorithm", "The GPU does not support this algorithm: use another precision=."),
    (
        r"CustomSPMDPartitioning",
        "The compiler cannot partition a function with custom_partitioning here: call the function "
        "within jax.shard_map.",
    ),
    (r"[Hh]ost ?[Cc]allback|callback", "A callback needs a running device: remove it."),
)


REFRESH = 0.5  # seconds between two looks at a compiler that runs


class Compilers:
    """A child process that compiles one program."""

    def __init__(self, process: subprocess.Popen, connection: Any, folder: Path):
        self.process, self.connection, self.folder = process, connection, folder

    def compile(
        self,
        target: Target,
        timeout: float,
        options: Options,
        program: bytes,
        answer_question: Answer = lambda question: {},
    ) -> dict[str, Any]:
        """Runs `_jax.compile_only` in the child process and returns its result.

        ``answer_question`` answers the questions that the child asks while it compiles.

        Raises:
            OutOfMemoryError: If the compiler reports that the program does not fit.
            CompileError: If the compiler rejects the program for another reason, or crashes.
            TimeoutError: If compiling takes more than ``timeout`` seconds.
        """
        request = {
            "platform": target.platform,
            "topology": target.topology,
            "config": target.config,
            "count": target.devices,
            "program": str(self.folder / "program"),
            "timeout": timeout,
            "options": options,
        }
        # In a file, because requests are JSON, which has no bytes.
        (self.folder / "program").write_bytes(program)
        try:
            self.connection.send_bytes(json.dumps(request).encode())
            end = time.monotonic() + timeout
            while True:
                # Waits in short turns, so that the progress bar shows that the compiler still runs.
                while not self.connection.poll(min(REFRESH, max(0.0, end - time.monotonic()))):
                    still_running()
                    if time.monotonic() >= end:
                        raise TimeoutError(
                            f"compiling for target={target.name!r} took more than timeout="
                            f"{timeout:g} seconds. Use a larger timeout, or make the program "
                            "smaller (lax.scan over equal layers)."
                        )
                answer = json.loads(self.connection.recv_bytes())
                if "question" not in answer:
                    break
                reply = answer_question(answer["question"])
                self.connection.send_bytes(json.dumps(reply).encode())
        except (EOFError, ConnectionError):
            self._tell_of_death(target)
        if "error" in answer:
            _refuse(target, answer["error"])
        return answer

    def _tell_of_death(self, target: Target) -> NoReturn:
        # The connection closes a moment before the process has ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        code = self.process.returncode
        died = code is not None and code < 0
        ending = signal.Signals(-code).name if died else f"exit status {code}"
        if code == -signal.SIGKILL:
            ending += ", probably because this machine ran out of memory"
        log = (self.folder / "stderr").read_text(errors="replace")
        lines = [line for line in log.splitlines() if line.strip()]
        raise CompileError(
            f"the compiler of target={target.name!r} crashed ({ending}). Its last messages:\n"
            + "\n".join(lines[-8:])
        )


@contextlib.contextmanager
def compilers(target: Target) -> Iterator[Compilers]:
    """Starts a child process that compiles, and ends it on exit.

    Raises:
        ImportError: If the compiler of the target is not installed.
    """
    require(target)
    from multiprocessing import Pipe

    ours, theirs = Pipe()
    # The child gets the number of the file descriptor and this process's module path.
    command = [sys.executable, "-c", BOOT, json.dumps([p or os.getcwd() for p in _path()])]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(DROPPED)}
    with tempfile.TemporaryDirectory(prefix="mpjax-") as name:
        folder = Path(name)
        with ours, (folder / "stderr").open("wb") as stderr:
            with theirs:
                process = subprocess.Popen(
                    [*command, str(os.getpid()), str(theirs.fileno())],
                    env={**kept, **ENVIRONMENT},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # ends ptxas too; Ctrl-C reaches this process alone
                )
            try:
                yield Compilers(process, ours, folder)
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def require(target: Target) -> None:
    """Raises an ImportError that names the missing packages, if the compiler is not installed."""
    missing = missing_for(target.platform)
    if missing:
        kind = "GPU" if target.platform == "cuda" else "TPU"
        raise ImportError(
            f"compiling for target={target.name!r} needs {' and '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed: pip install 'mpjax[aot]' "
            f"(all targets), or 'mpjax[aot-{target.platform}]'. No {kind} and no driver is needed."
        )


def missing_for(platform: str) -> list[str]:
    """Returns the packages that are missing to compile for "cuda" or "tpu"."""
    if platform == "tpu":
        return [] if _version("libtpu") else ["libtpu"]
    missing, wanted = [], _version("jaxlib")
    plugins = {name: version for name in CUDA_PLUGINS if (version := _version(name))}
    # JAX does not load a plugin of another version than jaxlib's.
    if wanted not in plugins.values():
        present = ", ".join(f"{name} {version}" for name, version in plugins.items())
        note = f" (found: {present})" if present else ""
        missing.append(f"{CUDA_PLUGINS[0]}=={wanted}{note}")
    if not any(map(_version, NVCC)) and not _toolkit():
        missing.append(NVCC[0])
    return missing


def _toolkit() -> bool:
    """Returns whether a CUDA toolkit is installed, which can replace NVIDIA's wheel."""
    return bool(shutil.which("ptxas")) or Path("/usr/local/cuda").exists()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _path() -> list[str]:
    """Returns the module path, with mpjax's own folder if it is not on the path."""
    package = importlib.util.find_spec("mpjax")
    root = str(Path(package.origin).parent.parent) if package and package.origin else ""
    return [*sys.path, *([root] if root and root not in sys.path else [])]


def _refuse(target: Target, error: str) -> NoReturn:
    """Raises a compiler's error, with its essential line and advice."""
    line = essential(error)
    advice = next((text for pattern, text in ADVICE if re.search(pattern, error)), "")
    message = f"the compiler of target={target.name!r} refused: {line}"
    if "RESOURCE_EXHAUSTED" in error and "hbm" in error.lower():  # not a kernel's scratch memory
        raise OutOfMemoryError(
            f"{message} Use a smaller batch (mpjax.hardware.largest_batch finds the largest), or a "
            "target with more memory."
        )
    raise CompileError(f"{message} {advice}".rstrip())


def essential(error: str) -> str:
    """Returns a compiler's error as one sentence, without the traces that follow it."""
    kept = re.split(r"Suspected Python Code Location|\[xla::|\n\n|\n\s*=+", error)[0]
    kept = re.sub(r"^(\w+Error: )", "", kept)
    kept = re.sub(r"\s+", " ", kept).strip()
    kept = kept if len(kept) <= 600 else kept[:600] + "..."
    return kept if kept.endswith((".", "...")) else kept + "."
