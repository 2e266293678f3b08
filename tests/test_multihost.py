"""The example for many hosts, on two processes of two CPU devices: NaN, kills, other devices."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "examples" / "launch"
LAUNCHED = ROOT / "tests" / "helpers" / "launched.py"
sys.path.insert(0, str(ROOT / "examples"))

import multihost  # noqa: E402

# Far more than anything takes: a test that waits this long has failed.
DEADLINE = 300
# What the runs that are stopped and resumed have in common with the one that is not.
RUN = {"steps": 40, "every": 5, "policy": "O2:float16", "log-every": 1}


class Job:
    """Processes that train together, each with its output in a file."""

    def __init__(self, folder, processes=2, devices=2, **options):
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            options["coordinator"] = f"localhost:{free.getsockname()[1]}"
        options["processes"] = processes
        flags = f"--xla_force_host_platform_device_count={devices} "
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags + "--xla_backend_optimization_level=0",
        }
        self.outputs = [folder / f"output_{i}" for i in range(processes)]
        self.processes = []
        for i, path in enumerate(self.outputs):
            arguments = [f"--{name}={value}" for name, value in {**options, "process": i}.items()]
            with path.open("w") as out:
                self.processes.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            "-W",
                            "error",
                            LAUNCHED,
                            *arguments,
                        ],
                        env=env,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )

    def said(self, process=0):
        return self.outputs[process].read_text()

    def wait_for(self, text):
        """Waits until process 0 has printed something."""
        end = time.monotonic() + DEADLINE
        while text not in self.said():
            assert time.monotonic() < end and self.processes[0].poll() is None, self.said()
            time.sleep(0.01)

    def codes(self):
        """Waits until all processes have ended, and returns their exit statuses."""
        return [process.wait(DEADLINE) for process in self.processes]

    def ends(self):
        """Waits until all processes are done, and returns what each of them holds at the end."""
        codes = self.codes()
        assert not any(codes), [self.said(i) for i, code in enumerate(codes) if code]
        found = []
        for i in range(len(self.processes)):
            [line] = re.findall("^end (.*)$", self.said(i), re.MULTILINE)
            found.append(json.loads(line))
        return found

    @property
    def first(self):
        """The step that it went on from."""
        return int(re.search(r"from step (\d+)", self.said())[1])


@pytest.fixture
def start():
    """Starts jobs, and ends what is left of them."""
    with jobs() as started:
        yield started


@contextlib.contextmanager
def jobs():
    started = []

    def start(*args, **kwargs):
        started.append(Job(*args, **kwargs))
        return started[-1]

    try:
        yield start
    finally:
        for process in (process for job in started for process in job.processes):
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that is never stopped: its directory, and its end."""
    folder = tmp_path_factory.mktemp("whole")
    with jobs() as started:
        one, other = started(folder, directory=folder / "run", **RUN).ends()
    assert one == other
    return folder / "run", one


@pytest.mark.thorough
def test_a_nan_on_one_process_is_skipped_on_all(start, tmp_path):
    options = {"steps": 8, "every": 4, "policy": "mixed_float16", "log-every": 1}
    nan = {"nan-at": 5, "nan-on": 1}
    job = start(tmp_path, directory=tmp_path / "run", **options, **nan)
    one, other = job.ends()
    assert one == other  # loss, scale and every bit of the state
    assert (one["skipped_steps"], one["steps"]) == (1, 7)
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", job.said())]
    assert losses[4] != losses[4]
    assert losses[-1] < losses[3] < losses[0]


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_processes_of_a_multihost_run_hold_the_same_in_the_end(start, tmp_path, policy):
    job = start(tmp_path, directory=tmp_path / "run", steps=30, policy=policy)
    one, other = job.ends()
    assert one == other
    assert one["loss"] < 3.5 and one["skipped_steps"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [1, 0], ids=["worker", "coordinator"])
def test_a_killed_process_costs_no_more_than_the_steps_since_the_checkpoint(
    start, tmp_path, whole, victim
):
    directory = tmp_path / "run"
    job = start(tmp_path / "killed", directory=directory, **RUN)
    job.wait_for("step 23:")
    job.processes[victim].send_signal(signal.SIGKILL)
    codes = job.codes()
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == -signal.SIGABRT  # by JAX
    assert "step 40:" not in job.said()
    again = start(tmp_path / "again", directory=directory, **RUN)
    ends = again.ends()
    assert 15 <= again.first < 40 and again.first % RUN["every"] == 0
    assert ends == [whole[1]] * 2


@pytest.mark.thorough
def test_a_job_beside_one_that_still_lives_is_refused_on_all_processes(start, tmp_path, whole):
    directory = tmp_path / "run"
    job = start(tmp_path / "first", directory=directory, **RUN)
    job.wait_for("step 6:")
    second = start(tmp_path / "second", directory=directory, **RUN)
    assert all(second.codes())
    for process in range(2):
        pid = job.processes[0].pid
        assert f"has a Manager already, of process {pid} on host" in second.said(process)
    assert job.ends() == [whole[1]] * 2


@pytest.mark.thorough
def test_sigterm_to_one_process_stops_all_at_one_step_which_is_saved(start, tmp_path, whole):
    directory = tmp_path / "run"
    job = start(tmp_path / "stopped", directory=directory, **RUN)
    job.wait_for("step 23:")
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.codes() == [multihost.STOPPED] * 2, job.said()
    step = int(re.search(r"stopped at step (\d+)", job.said())[1])
    again = start(tmp_path / "again", directory=directory, **RUN)
    assert again.ends() == [whole[1]] * 2
    assert again.first == step


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [2, 4])
def test_multihost_run_goes_on_on_other_devices(start, tmp_path, whole, devices):
    directory = tmp_path / "run"
    shutil.copytree(whole[0], directory)
    for number in (35, 40):
        shutil.rmtree(directory / str(number))
    job = start(tmp_path / "other", processes=1, devices=devices, directory=directory, **RUN)
    [end] = job.ends()
    assert job.first == 30
    # Sums in another order: half matmuls differ in their last bits.
    assert end["loss"] == pytest.approx(whole[1]["loss"], rel=2e-3)
    assert (end["steps"], end["skipped_steps"]) == (40, 0)


def options_of(words):
    """Returns the example's options among the words of a command; it must be the last in it."""
    at = next(i for i, word in enumerate(words) if word.endswith("examples/multihost.py"))
    multihost.main.make_context("multihost", list(words[at + 1 :]))  # each is known, and legal
    return {word.split("=")[0] for word in words[at + 1 :] if word.startswith("--")}


def test_the_slurm_script_is_a_script_and_its_options_exist():
    script = LAUNCH / "slurm.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    [command] = re.findall(r"^srun .*?[^\\]$", script.read_text(), re.MULTILINE | re.DOTALL)
    words = command.replace("\\\n", " ").split("||")[0].split()
    assert options_of(words) >= {"--directory", "--steps"}


def test_the_manifest_of_kubernetes_fits_the_example():
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    assert service["kind"] == "Service" and service["spec"]["clusterIP"] == "None"
    spec, name = job["spec"], job["metadata"]["name"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    words = [*container["command"], *container.get("args", ())]
    assert spec["completionMode"] == "Indexed"
    assert f"--processes={spec['completions']}" in words
    assert spec["parallelism"] == spec["completions"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--coordinator={name}-0.{pod['subdomain']}:1234" in words
    assert options_of(words) >= {"--coordinator", "--processes", "--directory"}
    assert "placeholder" in container["image"]
    [volume] = container["volumeMounts"]
    assert f"--directory={volume['mountPath']}/byte_gpt" in words
