# ruff: noqa: E501 (the programs are one line each)
"""The isolation layers for real root, an ordinary user and a machine without namespaces; missing ones are reported or
refused."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.conftest import QUICK, Box, make_box
from tests.sandbox.test_hostile import CHEATING, HONEST, KERNEL, Case, contained
from upshot.core.errors import UserError
from upshot.sandbox import Limits, Outcome, Sandbox, StdioTest
from upshot.sandbox.inside import seccomp
from upshot.sandbox.inside.syscall_table import AARCH64, X86_64

REPOSITORY = Path(__file__).parents[2]
DRIVER = """
import asyncio, json, sys
from upshot.sandbox import Limits, Sandbox, StdioTest

async def main():
    async with Sandbox(slots=1, disable=json.loads(sys.argv[1]), limits=Limits(cpu_seconds=2, wall_seconds=8)) as box:
        async def one(program, test="assert answer() == 'blocked'"):
            return (await box.test_program(program, [test]))[0].outcome
        say = {"layers": box.describe_layers()}
        say["honest"] = await one("def add(a, b):\\n    return a + b", "assert add(1, 2) == 3")
        say["judged"] = await one("def add(a, b):\\n    return a + b", "assert abs(add(1, 2) - 3) < 1e-9")
        say["stdio"] = (await box.test_stdio("print(int(input()) + 1)", [StdioTest("1", "2")]))[0].outcome
        for name, body in {
            "read": "open('/etc/shadow')", "host": "open(%r)" % __import__("upshot").__file__,
            "write": "open('/tmp/../evil', 'w')", "socket": "import socket; socket.socket()",
            "kill": "import os; os.kill(%d, 0)" % __import__("os").getpid(),
        }.items():
            say[name] = await one(f"def answer():\\n    try:\\n        {body}\\n        return 'open'\\n    except OSError:\\n        return 'blocked'")
        say["mount"] = await one("import ctypes\\ndef answer():\\n    ctypes.CDLL(None).mount(0, 0, 0, 0, 0)")
        say["loop"] = await one("def answer():\\n    while True: pass")
        say["memory"] = await one("def answer():\\n    return len(bytes(8 << 30))")
        say["forks"] = await one("import os\\ndef answer():\\n    while True: os.fork()")
        say["files"] = (await box.run("import os; open('left', 'w'); print(os.getcwd())")).outcome
        say["next"] = await one("import os\\ndef answer():\\n    return os.path.exists('left')", "assert answer() == False")
    print(json.dumps(say))

asyncio.run(main())
"""


OWNER = """
import fcntl, os, socket, struct, time
def f():
    for pid in (os.getppid(), VICTIM):
        r, w = socket.socketpair()
        for call in (
            lambda: fcntl.fcntl(r, fcntl.F_SETOWN, pid),
            lambda: fcntl.fcntl(r, 15, struct.pack("ii", 1, pid)),
            lambda: fcntl.ioctl(r, 0x8901, struct.pack("i", pid)),
            lambda: fcntl.ioctl(r, 0x8902, struct.pack("i", pid)),
            lambda: fcntl.fcntl(r, 10, 9),
        ):
            try:
                call()
            except OSError:
                pass
        fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        w.send(b"x")
    time.sleep(0.05)
    return 1
"""
OLD_KERNEL = """
import asyncio, json, subprocess, sys
from dataclasses import replace
from upshot.sandbox.local import layers
from upshot.sandbox import Limits, Sandbox

found = layers.probe
layers.probe = lambda disable=(): replace(found(disable), landlock=min(found(disable).landlock, 5))

async def main():
    disable, programs = json.loads(sys.argv[1])
    victim = subprocess.Popen(["sleep", "3600"])
    say = {}
    async with Sandbox(slots=3, disable=disable, limits=Limits(cpu_seconds=5)) as box:
        say["layers"] = box.describe_layers()
        for name, program in programs.items():
            slow = "import time\\ndef f(): time.sleep(.5); return 2"
            honest = [asyncio.create_task(box.test_program(slow, ["assert f() == 2"])) for _ in range(2)]
            await asyncio.sleep(.2)
            own = await box.test_program(program.replace("VICTIM", str(victim.pid)), ["assert f() == 1"])
            say[name] = [own[0].outcome, *(results[0].outcome for results in await asyncio.gather(*honest))]
        say["faults"] = box.metrics.faults
    say["victim"] = victim.poll()
    victim.kill()
    print(json.dumps(say))

asyncio.run(main())
"""
AGAINST_OTHERS = {
    "signals to its group": "import os\ndef f(): return 1\nos.kill(0, 9)",
    "niceness of its group": "import os\ndef f():\n    os.setpriority(os.PRIO_PGRP, 0, 19)\n    return 1",
    "the owner of a socket": OWNER,
}


def drive(python: str, uid: int | None, task: list[Any], driver: str = DRIVER) -> dict[str, Any]:
    """Run a driver in a separate process, as another user if asked to."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    extra: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
    done = subprocess.run(
        [python, "-c", driver, json.dumps(task)],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        **extra,
    )
    if "isolates too little" in done.stderr or "lacks the required layer" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def python_for_others() -> str:
    """An interpreter that an ordinary user can start and that can read this package."""
    if os.getuid() != 0:
        return sys.executable
    for python in (sys.executable, "/usr/bin/python3"):
        probe = "import sys, upshot.sandbox.inside.zygote; sys.exit(sys.version_info < (3, 11))"
        done = (
            subprocess.run(
                [python, "-c", probe],
                env={"PYTHONPATH": str(REPOSITORY)},
                cwd="/",
                user=65534,
                group=65534,
                capture_output=True,
                check=False,
            )
            if os.access(python, os.X_OK) and _starts(python)
            else None
        )
        if done is not None and done.returncode == 0:
            return python
    pytest.skip("no Python 3.11 here that an ordinary user may start")


def _starts(python: str) -> bool:
    try:
        subprocess.run([python, "-c", ""], user=65534, group=65534, cwd="/", check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def check(say: dict[str, Any], namespaces: bool) -> None:
    """What must hold in every mode."""
    assert say["honest"] == say["judged"] == say["stdio"] == say["files"] == say["next"] == "passed", say
    for name in ("read", "host", "socket", "kill"):
        assert say[name] == "passed", (name, say)
    assert say["write"] in ("passed", "error"), say
    assert say["mount"] == "killed_by_policy" and say["loop"] == "timeout" and say["memory"] == "out_of_memory", say
    assert say["forks"] in ("error", "timeout", "out_of_memory"), say
    assert say["layers"]["namespaces"].startswith("missing") != namespaces


def test_an_ordinary_user_gets_full_isolation() -> None:
    say = drive(python_for_others(), 65534 if os.getuid() == 0 else None, [])
    if say["layers"]["namespaces"].startswith("missing"):
        pytest.skip(f"this kernel gives ordinary users no namespaces: {say['layers']['namespaces']}")
    check(say, namespaces=True)


def test_an_ordinary_user_without_namespaces_is_still_contained() -> None:
    check(drive(python_for_others(), 65534 if os.getuid() == 0 else None, ["namespaces", "cgroup"]), namespaces=False)


def test_root_with_a_user_namespace_only() -> None:
    if os.getuid() != 0:
        pytest.skip("not root")
    check(drive(python_for_others(), None, ["root"]), namespaces=True)


@pytest.mark.parametrize("disable", [[], ["namespaces", "cgroup"]], ids=["namespaces", "none"])
@pytest.mark.parametrize("user", [65534, None], ids=["ordinary", "own"])
def test_before_landlock_6_a_program_reaches_no_neighbour_by_signals(user: int | None, disable: list[str]) -> None:
    user = user if os.getuid() == 0 else None
    python = python_for_others() if user else sys.executable
    say = drive(python, user, [disable, AGAINST_OTHERS], OLD_KERNEL)
    assert say["faults"] == 0 and say["victim"] is None, say
    for name in AGAINST_OTHERS:
        assert say[name][1:] == ["passed", "passed"], (name, say)


@pytest.fixture(scope="module")
def bare_box() -> Iterator[Box]:
    made = make_box(disable={"namespaces", "cgroup"})
    yield made
    made.close()


OUTSIDE = [
    *KERNEL,
    *CHEATING,
    contained("fork", "import os\ndef answer():\n    os.fork()", Outcome.ERROR),
    contained("exec", "import subprocess\ndef answer():\n    subprocess.run(['/bin/true'])", Outcome.ERROR),
    contained("killing the zygote", "import os\ndef answer():\n    os.kill(os.getppid(), 9)", Outcome.ERROR),
    contained("killing everybody", "import os\ndef answer():\n    os.kill(-1, 9)", Outcome.ERROR),
    contained(
        "limits of the parent",
        "import os, resource\ndef answer():\n    resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))",
        Outcome.ERROR,
    ),
    contained("host files", "def answer():\n    return open('/etc/passwd').read()", Outcome.ERROR),
    contained("process table", "import os\ndef answer():\n    return os.listdir('/proc')", Outcome.ERROR),
    contained(
        "disk fill",
        "def answer():\n    f = open('x', 'wb')\n    while True:\n        f.write(b'x' * (1 << 20))",
        Outcome.ERROR,
    ),
    contained("host's temporary files", "import os\ndef answer():\n    return os.listdir('/tmp')", Outcome.ERROR),
]


@pytest.mark.parametrize("case", OUTSIDE, ids=lambda case: case.name.replace(" ", "-"))
def test_without_namespaces_a_hostile_program_is_contained(case: Case, bare_box: Box) -> None:
    results = bare_box(bare_box.sandbox.test_program(case.program, case.tests))
    allowed = {*case.allowed, Outcome.ERROR, *([Outcome.UNCONFIRMED] if Outcome.WRONG in case.allowed else [])}
    assert all(result.outcome in allowed for result in results), results
    assert bare_box.strangers() == []
    honest = bare_box(bare_box.sandbox.test_program(HONEST, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]))
    assert [result.value for result in honest] == [1, 0]


def test_without_namespaces_other_languages_are_refused(bare_box: Box) -> None:
    with pytest.raises(UserError, match="needs namespaces"):
        bare_box(bare_box.sandbox.run("echo", "bash"))


@pytest.mark.parametrize(
    "mess",
    [
        "open('x', 'w').write('x')\nos.symlink('/etc', 'link')",
        "os.umask(0o777)\nos.mkdir('d')\nopen('x', 'w')",  # there is no chmod without namespaces
        "for _ in range(1100):\n    os.mkdir('d')\n    os.chdir('d')",
    ],
)
def test_without_namespaces_leftovers_are_removed_before_the_next_run(mess: str, bare_box: Box) -> None:
    made = bare_box(bare_box.sandbox.run(f"import os\n{mess}", limits=Limits(cpu_seconds=10)))
    assert made.outcome is Outcome.PASSED, made
    for _ in range(2):
        assert bare_box(bare_box.sandbox.run("import os; print(os.listdir('.'))")).stdout == "[]\n"


def test_without_namespaces_files_outside_keep_their_rights_times_and_content(bare_box: Box, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("x")
    for folder in (tmp_path, *tmp_path.parents):  # for a run that has a user id of its own
        if folder.stat().st_uid == os.getuid() and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    before = file.stat()
    for change in ("os.chmod(p, 0o777)", "os.utime(p, (1, 1))", "os.truncate(p, 0)", "os.open(p, os.O_TRUNC)"):
        result = bare_box(bare_box.sandbox.run(f"import os\np = {str(file)!r}\n{change}"))
        assert result.outcome is Outcome.ERROR and "PermissionError" in result.stderr, result
    after = file.stat()
    assert (after.st_mode, after.st_mtime, after.st_size) == (before.st_mode, before.st_mtime, 1)


def test_without_namespaces_pytest_runs_the_tests_that_only_it_can(bare_box: Box) -> None:
    test = "import pytest\n@pytest.mark.parametrize('a, b', [(1, 2), (2, {})])\ndef test_f(a, b):\n    assert f(a) == b"
    tests = [test.format(3), test.format(4)]
    results = bare_box(bare_box.sandbox.test_program("def f(x): return x + 1", tests))
    assert [result.outcome for result in results] == [Outcome.UNCONFIRMED, Outcome.WRONG], results


def test_without_namespaces_threads_and_asyncio_still_work(bare_box: Box) -> None:
    program = "import threading, asyncio\nt = threading.Thread(target=print, args=(1,))\nt.start()\nt.join()\nasyncio.run(asyncio.sleep(0))\nprint(input())"
    results = bare_box(bare_box.sandbox.test_stdio(program, [StdioTest("2", "1\n2")]))
    assert results[0].outcome is Outcome.PASSED, results


def test_a_demanded_layer_that_is_missing_refuses_to_start() -> None:
    async def start() -> None:
        async with Sandbox(slots=1, require="namespaces", disable={"namespaces"}):
            raise AssertionError("started")

    with pytest.raises(UserError, match="lacks the required layer 'namespaces'"):
        asyncio.run(start())


def test_an_unknown_layer_is_named() -> None:
    async def start() -> None:
        async with Sandbox(slots=1, require="namespace"):
            raise AssertionError("started")

    with pytest.raises(UserError, match="did you mean 'namespaces'"):
        asyncio.run(start())


def test_nothing_weaker_than_seccomp_and_file_isolation_is_accepted() -> None:
    for disable in ({"seccomp"}, {"namespaces", "landlock"}):
        with pytest.raises(UserError, match="isolates too little"):
            asyncio.run(Sandbox(slots=1, limits=QUICK, disable=disable).start())


def test_a_v2_cgroup_is_created_below_our_own_or_at_the_top_if_nothing_is_limited(tmp_path: Path) -> None:
    from upshot.sandbox.local.cgroup import _v2_home

    own = tmp_path / "session.scope"
    own.mkdir()
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids")
    assert _v2_home(tmp_path, own) == tmp_path  # ours has no children with controllers
    (own / "memory.max").write_text("1000000")
    with pytest.raises(OSError):
        _v2_home(tmp_path, own)  # at the top, a run would escape our own limit
    (own / "cgroup.subtree_control").write_text("memory pids")
    assert _v2_home(tmp_path, own) == own


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_compiles_for_both_architectures(machine: str) -> None:
    program = seccomp.build(None, machine)
    assert len(program) % 8 == 0 and len(program) // 8 < 4096


def _decide(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """Evaluate the filter as the kernel would."""
    import struct

    code = [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]
    data = {0: number, 4: arch} | {16 + 8 * index: value for index, value in enumerate(arguments)}
    at, value = 0, 0
    while True:
        op, yes, no, k = code[at]
        at += 1
        if op == seccomp.RET:
            return k
        if op == seccomp.LOAD:
            value = data.get(k, 0)
        elif op == seccomp.JA:
            at += k
        else:
            hit = {seccomp.JEQ: value == k, seccomp.JGE: value >= k, seccomp.JSET: bool(value & k)}[op]
            at += yes if hit else no


@pytest.mark.parametrize(("machine", "table"), [("x86_64", X86_64), ("aarch64", AARCH64)])
def test_the_filter_decides_every_system_call_by_its_lists(machine: str, table: dict[str, int]) -> None:
    from upshot.sandbox.inside.syscall_table import ALLOWED, AUDIT_ARCH, FATAL, GUARDED

    program = seccomp.build(None, machine)
    arch = AUDIT_ARCH[machine]
    by_number = {number: name for name, number in table.items()}
    for number in range(600):
        decision = _decide(program, arch, number)
        name = by_number.get(number, "")
        if name in GUARDED:
            continue
        wanted = seccomp.RET_ALLOW if name in ALLOWED else seccomp.RET_KILL if name in FATAL else None
        assert decision == wanted if wanted is not None else decision >> 16 == seccomp.RET_ERRNO >> 16, (number, name)
    assert _decide(program, 0x1234, 0) == seccomp.RET_KILL
    assert _decide(program, arch, table["clone"], 0x10000000) == seccomp.RET_KILL
    assert _decide(program, arch, table["clone"], 17) == seccomp.RET_ALLOW
    assert _decide(program, arch, table["socketpair"], 2) != seccomp.RET_ALLOW
    assert _decide(program, arch, table["wait4"], 1, 0, 0, 0) == seccomp.RET_ALLOW
    for call, arguments in (("wait4", (1, 0, 0, 8)), ("waitid", (0, 0, 0, 0, 8)), ("preadv2", (3, 0, 1, 0, 0, 8))):
        assert _decide(program, arch, table[call], *arguments) != seccomp.RET_ALLOW
    assert [_decide(program, arch, table["madvise"], 0, 0, n) == seccomp.RET_ALLOW for n in (4, 20, 21)] == [1, 0, 0]
    assert _decide(seccomp.build(None, machine, native=True), arch, table["getrusage"]) == seccomp.RET_ALLOW
    groups = {(0, 0): True, (5, 5): True, (5, 6): True, (0, 5): False, (1, 5): False, (1, 0): False}
    assert all((_decide(program, arch, table["setpgid"], *g) == seccomp.RET_ALLOW) is ok for g, ok in groups.items())
    alone = seccomp.build(4711, machine)
    assert _decide(alone, arch, table["clone"], 17) != seccomp.RET_ALLOW
    assert _decide(alone, arch, table["clone"], 0x00010000) == seccomp.RET_ALLOW
    assert _decide(alone, arch, table["kill"], 1) != seccomp.RET_ALLOW
    assert _decide(alone, arch, table["setpgid"], 5, 6) != seccomp.RET_ALLOW
    assert _decide(alone, arch, table["setpgid"], 0, 0) == seccomp.RET_ALLOW
    for flags, allowed in ((0, True), (1, True), (0x241, True), (0x242, True), (0x200, False), (0x240, False)):
        assert (_decide(alone, arch, table["openat"], 0, 0, flags) == seccomp.RET_ALLOW) is allowed
    assert not any(
        _decide(alone, arch, table[name]) == seccomp.RET_ALLOW for name in seccomp.UNWATCHED if name in table
    )
    assert _decide(alone, arch, table["kill"], 4711) == seccomp.RET_ALLOW
    for call, allowed, refused in (
        ("fcntl", (0, 2, 4, 1030), (8, 10, 15)),
        ("ioctl", (0x5401, 0x5421), (0x8901, 0x8902)),
    ):
        assert all(_decide(alone, arch, table[call], 3, command) == seccomp.RET_ALLOW for command in allowed)
        assert not any(_decide(alone, arch, table[call], 3, command) == seccomp.RET_ALLOW for command in refused)
