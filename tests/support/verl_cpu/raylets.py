"""A Ray of two raylets with different host names on one machine, for runs that join a Ray instead of starting one.

Each stays in the foreground of its own session, since `ray stop` ends every Ray on a machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.patience import patience
from tests.support.verl_cpu.settings import ENVIRONMENT
from upshot.core.process import Reaper, end_session
from upshot.verl.launch import WAITS

CPUS, GPUS = 12, 1
UP_S = 300.0


@contextmanager
def two_raylets(names: tuple[str, str] = ("first", "second")) -> Iterator[str]:
    """The address of a Ray with two nodes, up while inside."""
    folder = Path(
        tempfile.mkdtemp(prefix="ray", dir="/tmp")
    )  # sockets are created there, and their paths must be short
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started: list[subprocess.Popen[bytes]] = []
    reaper = Reaper()  # however this process ends, they end as well
    try:
        head = ["--head", f"--port={address.partition(':')[2]}", "--include-dashboard=false", f"--temp-dir={folder}"]
        started.append(_start(names[0], ["--node-ip-address=127.0.0.1", *head], folder))
        reaper.watch(started[0].pid)
        _wait_for(address, started[0], folder, 1)
        started.append(_start(names[1], [f"--address={address}", "--node-ip-address=127.0.0.1"], folder))
        reaper.watch(started[1].pid)
        _wait_for(address, started[1], folder, 2)
        yield address
    finally:
        for process in reversed(started):
            end_session(process.pid)
            process.wait()
            reaper.forget(process.pid)
        reaper.close()
        shutil.rmtree(folder, ignore_errors=True)


def _start(name: str, words: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """A raylet with its own host name, if this machine allows that."""
    root = str(Path(__file__).parents[3])
    ray = [sys.executable, "-m", __name__, "start", "--block", f"--num-cpus={CPUS}", f"--num-gpus={GPUS}"]
    own = ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh"] if can_rename() else []
    env = {**WAITS, **ENVIRONMENT, **os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1"}
    with (folder / f"{name}.said").open("ab") as file:
        return subprocess.Popen(
            [*own, *ray, *words], stdout=file, stderr=file, start_new_session=True, env=env, cwd=folder
        )


def can_rename() -> bool:
    """Whether a process may have its own host name here."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--uts", "hostname", "x"], capture_output=True).returncode == 0


def _wait_for(address: str, process: subprocess.Popen[bytes], folder: Path, nodes: int) -> None:
    """Wait until this many nodes are up."""
    code = f"import ray; ray.init({address!r}, logging_level='ERROR', log_to_driver=False)\n"
    code += f"raise SystemExit(sum(node['Alive'] for node in ray.nodes()) < {nodes})"  # Ray prints other lines as well
    began = time.monotonic()
    while time.monotonic() - began < patience(UP_S):
        told = "".join(path.read_text() for path in folder.glob("*.said"))
        assert process.poll() is None, f"a raylet ended with {process.returncode}:\n{told}"
        if subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0:
            return
        time.sleep(0.5)
    raise AssertionError(f"Ray did not come up:\n{told}")


if __name__ == "__main__":  # the command `ray`
    from ray.scripts.scripts import main

    from upshot.verl.adapters.ray_start import be_patient

    be_patient()
    main()
