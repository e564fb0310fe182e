"""Processes for tests that need one, forked where PyTorch and transformers are already imported.

A new interpreter takes ten seconds of CPU time to import them. So the process that runs the tests forks a server before
its first test, when it has imported all test modules, computed nothing and started no thread; the server forks
processes on request. Tests about a fresh interpreter (what is imported, how long that takes) must not use it.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

cpu_s = 0.0
"""CPU seconds of all ended processes that were forked for this process."""
_server: socket.socket | None = None
_REQUEST_BYTES = 1 << 20


def start_server() -> None:
    """Fork the server, which ends with this process."""
    global _server
    _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
    if not os.fork():
        _server.close()
        _serve(theirs)


def _serve(requests: socket.socket) -> NoReturn:
    """Fork processes on request, until nobody can request any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the helper processes that wait for the forked ones
    while True:
        message, files, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
        if not message:
            os._exit(0)
        if not os.fork():
            _wait_for_one(json.loads(message), *files)
        for file in files:
            os.close(file)


def _wait_for_one(request: dict[str, Any], stdin: int, output: int, status: int) -> NoReturn:
    """Fork the process and report its id; when it ends, report its exit status and CPU time."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if not pid:
        _become(request, stdin, output)
    for file in (stdin, output):
        os.close(file)
    with os.fdopen(status, "w") as told:
        print(pid, file=told, flush=True)
        _, code, used = os.wait4(pid, 0)
        print(os.waitstatus_to_exitcode(code), used.ru_utime + used.ru_stime, file=told, flush=True)
    os._exit(0)


def _become(request: dict[str, Any], stdin: int, output: int) -> NoReturn:
    """`python -m MODULE WORDS…`, as far as the module can tell."""
    code: Any = 1
    try:
        for number, file in enumerate((stdin, output, output)):
            os.dup2(file, number)
        os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        sys.stdin, sys.stdout, sys.stderr = (open(n, mode, closefd=False) for n, mode in enumerate("rww"))  # noqa: SIM115
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        module, *words = request["words"]
        sys.argv[1:], sys.path[0] = words, request["cwd"]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


class Forked:
    """A process that runs `python -m MODULE WORDS…`; both of its output streams are read from `stdout`."""

    def __init__(self, *words: str, env: Mapping[str, str], cwd: Path | None = None) -> None:
        assert _server is not None, "pytest's process starts the server before the first test"
        self.returncode: int | None = None
        read, write = os.pipe()
        self._status, status = os.pipe()
        request = {"words": words, "env": dict(env), "cwd": str(cwd or Path.cwd())}
        with open(os.devnull) as nothing:
            socket.send_fds(_server, [json.dumps(request).encode()], [nothing.fileno(), write, status])
        os.close(write)
        os.close(status)
        self.stdout: IO[str] = os.fdopen(read)
        self.pid = int(self._told())

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.communicate()
        self.stdout.close()
        os.close(self._status)

    def communicate(self) -> tuple[str, None]:
        """All its output until its end."""
        text = self.stdout.read()
        self.wait()
        return text, None

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Wait for its exit code."""
        global cpu_s
        if self.returncode is None:
            code, used = self._told().split()
            self.returncode, cpu_s = int(code), cpu_s + float(used)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def _told(self) -> str:
        """A line from the process that waits for this one."""
        line = b""
        while not line.endswith(b"\n"):
            more = os.read(self._status, 1)
            assert more, "the server of processes is gone"
            line += more
        return line.decode()
