"""Finds which layers of isolation work on this machine, by trying each in a throw-away process."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from upshot.sandbox.inside import confine, kernel, namespaces, seccomp

NO_IDS = "this container does not map a thousand user ids, of which each slot would take one"


def attempt(step: Callable[[], None]) -> str | None:
    """Run a step in a forked process; None if it worked, else the error."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            step()
            os.write(write, b"ok")
        except BaseException as error:
            os.write(write, str(error).encode() or b"failed")
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        word = pipe.read().decode()
    os.waitpid(pid, 0)
    return None if word == "ok" else word or "the process died"


def _namespaces(kind: str, workbench: str, uid: int | None) -> None:
    namespaces.enter(kind, workbench, uid)
    pid = kernel.fork_into(namespaces.RUN_FLAGS)
    if pid == 0:
        try:
            for step in namespaces.private_tmp(1, 64, os.getuid(), os.getgid()):
                kernel.perform(step)
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise OSError("a private /tmp could not be mounted")


def _confine(prepare: Callable[[], kernel.Step]) -> None:
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.perform(prepare())
    os.getpid()


def _read_as(uid: int) -> None:
    paths = namespaces.python_paths()  # before the change of user: unreachable paths would not be listed
    namespaces.become(uid)
    for path in paths:
        os.listdir(path)


def probe(uid: int | None) -> dict[str, Any]:
    """{layer: None if it works, else the reason}; `landlock_abi` is a number."""
    with tempfile.TemporaryDirectory(prefix="upshot-probe-") as workbench:
        os.chmod(workbench, 0o755)
        as_root = os.geteuid() == 0
        cannot_drop = "not root" if not as_root else NO_IDS if uid is None else None
        obstacles: dict[str, Any] = {"root": "not root", "user": NO_IDS}
        if as_root:
            obstacles["root"] = attempt(lambda: _namespaces("root", workbench, None))
        if uid is not None or not as_root:
            # Real root must first become another user: inside, it would still own root's files outside.
            obstacles["user"] = attempt(lambda: _namespaces("user", workbench, uid if as_root else None))
    obstacles["landlock_abi"] = version = confine.landlock_version()
    root = [os.open("/", os.O_PATH)]
    restricts = attempt(lambda: _confine(lambda: confine.restrict_files(version, root, root)))
    obstacles["landlock"] = restricts if version else "the kernel has no Landlock"
    obstacles["seccomp"] = attempt(lambda: _confine(seccomp.install))
    obstacles["uid"] = obstacles["uid_reads"] = cannot_drop
    if uid is not None and as_root:
        obstacles["uid"] = attempt(lambda: namespaces.become(uid))
        obstacles["uid_reads"] = attempt(lambda: _read_as(uid))
    return obstacles


def main() -> None:
    """Print the findings as JSON."""
    print(json.dumps(probe(json.loads(sys.argv[1]))))
