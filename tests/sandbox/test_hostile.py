# ruff: noqa: E501 (the programs are one line each)
"""Programs that try to break out or to pass undeservedly, each with what must happen; the sandbox must stay intact."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.patience import patience
from tests.sandbox.conftest import QUICK, Box, make_box
from upshot.sandbox import Outcome, StdioTest

PASSED, WRONG, ERROR, TIMEOUT = Outcome.PASSED, Outcome.WRONG, Outcome.ERROR, Outcome.TIMEOUT
MEMORY, OUTPUT, POLICY = Outcome.OUT_OF_MEMORY, Outcome.OUTPUT_LIMIT, Outcome.KILLED_BY_POLICY
SECRET = "wombat-in-the-pantry"
HONEST = "def add(a, b):\n    return a + b"
CALL = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\ndef answer():\n    return libc.syscall({number}, {rest})\n"


@dataclass(frozen=True)
class Case:
    """A program, its tests (by default it must return 8675309, which it does not know), and the allowed outcomes."""

    name: str
    program: str
    allowed: tuple[Outcome, ...]
    tests: tuple[str, ...] = ("assert answer() == 8675309",)
    wall_seconds: float = QUICK.wall_seconds


def contained(name: str, program: str, *allowed: Outcome) -> Case:
    """A program that must end in one of these ways."""
    return Case(name, program, allowed)


def idle(name: str, program: str) -> Case:
    """A program that waits until its time is up; its limit is shorter, since it needs no CPU."""
    return Case(name, program, (TIMEOUT,), wall_seconds=patience(1.5))


def blocked(name: str, body: str) -> Case:
    """A program that reports whether it got anywhere: answer() must return 'blocked' (or it dies by policy)."""
    lines = "\n        ".join(body.strip().splitlines())
    program = f"import os, sys\ndef answer():\n    try:\n        {lines}\n    except (OSError, ValueError, ImportError):\n        return 'blocked'\n"
    return Case(name, program, (PASSED, POLICY), ("assert answer() == 'blocked'",))


def policy(name: str, number: str, rest: str = "0, 0, 0, 0, 0") -> Case:
    """A system call that must kill."""
    from upshot.sandbox.inside.syscall_table import numbers

    return Case(name, CALL.format(number=numbers()[number], rest=rest), (POLICY,))


EXHAUSTION = [
    contained("fork bomb", "import os\ndef answer():\n    while True:\n        os.fork()", ERROR, TIMEOUT, MEMORY),
    contained(
        "fork bomb that catches",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        TIMEOUT,
        MEMORY,
        ERROR,
    ),
    contained(
        "thread bomb",
        "import threading, time\ndef answer():\n    while True:\n        threading.Thread(target=time.sleep, args=(99,)).start()",
        ERROR,
        MEMORY,
        TIMEOUT,
    ),
    contained("8 GB at once", "def answer():\n    return len(b'x' * (8 << 30))", MEMORY),
    contained(
        "memory by and by",
        "def answer():\n    a = []\n    while True:\n        a.append(bytearray(1 << 20))",
        MEMORY,
        TIMEOUT,
    ),
    contained(
        "memory in many processes",
        "import os, time\ndef answer():\n    for _ in range(20):\n        if os.fork() == 0:\n            x = bytearray(200 << 20)\n            time.sleep(9)\n    x = bytearray(200 << 20)\n    time.sleep(9)",
        MEMORY,
        ERROR,
        TIMEOUT,
    ),
    contained(
        "disk fill",
        "def answer():\n    for i in range(99):\n        open(f'/tmp/{i}', 'wb').write(b'x' * (10 << 20))",
        ERROR,
        MEMORY,
    ),
    contained(
        "one huge file",
        "def answer():\n    f = open('/tmp/x', 'wb')\n    while True:\n        f.write(b'x' * (1 << 20))",
        ERROR,
        MEMORY,
    ),
    contained(
        "inode fill",
        "def answer():\n    for i in range(10**6):\n        open(f'/tmp/{i}', 'w').close()",
        ERROR,
        TIMEOUT,
    ),
    contained(
        "shared memory fill",
        "def answer():\n    f = open('/dev/shm/x', 'wb')\n    while True:\n        f.write(b'x' * (1 << 20))",
        ERROR,
        MEMORY,
    ),
    contained(
        "descriptor exhaustion",
        "import os\ndef answer():\n    return [os.open('/dev/null', 0) for _ in range(10**6)]",
        ERROR,
    ),
    contained("100 MB of output", "def answer():\n    for _ in range(100):\n        print('x' * (1 << 20))", OUTPUT),
    contained(
        "100 MB of errors",
        "import sys\ndef answer():\n    for _ in range(100):\n        sys.stderr.write('x' * (1 << 20))",
        OUTPUT,
    ),
    contained("a huge result", "def answer():\n    return 'x' * (50 << 20)", OUTPUT, MEMORY, TIMEOUT, WRONG),
    contained("endless loop", "def answer():\n    while True:\n        pass", TIMEOUT),
    contained("endless loop in C", "def answer():\n    return sum(range(10**15))", TIMEOUT),
    contained(
        "catastrophic pattern", "import re\ndef answer():\n    return re.match('(a+)+$', 'a' * 60 + 'b')", TIMEOUT
    ),
    idle("sleeps for ever", "import time\ndef answer():\n    time.sleep(10**6)"),
    contained("huge integers", "def answer():\n    return 10 ** 10 ** 9", TIMEOUT, MEMORY, ERROR),
    contained("a huge integer comes back", "def answer():\n    return 7 ** 300000", WRONG),
    contained("deep recursion", "def answer(n=0):\n    return answer(n + 1)", ERROR),
    contained(
        "recursion without a limit",
        "import sys\nsys.setrecursionlimit(10**9)\ndef answer(n=0):\n    return answer(n + 1)",
        ERROR,
        MEMORY,
        TIMEOUT,
    ),
    contained("a list in itself", "def answer():\n    a = []\n    a.append(a)\n    return a", ERROR, WRONG),
    contained(
        "a deep list",
        "def answer():\n    a = []\n    for _ in range(10**5):\n        a = [a]\n    return a",
        ERROR,
        WRONG,
    ),
    contained("colliding keys", "def answer():\n    return {i * (2**61 - 1): 0 for i in range(2000)}", WRONG, TIMEOUT),
    contained(
        "zip bomb",
        "import io, zlib\ndef answer():\n    big = zlib.compress(b'0' * (100 << 20), 9)\n    return len(b''.join(zlib.decompress(big) for _ in range(99)))",
        MEMORY,
        TIMEOUT,
    ),
    contained(
        "raises its limits",
        "import resource\ndef answer():\n    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        ERROR,
    ),
]

SIGNALS = [
    contained(
        "ignores every signal",
        "import signal\nfor s in range(1, 65):\n    try:\n        signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError):\n        pass\nwhile True:\n    pass",
        TIMEOUT,
    ),
    idle(
        "stops itself",
        "import os, signal, time\ndef answer():\n    os.kill(os.getpid(), signal.SIGSTOP)\n    time.sleep(99)",
    ),
    contained(
        "kills its parent",
        "import os, signal\ndef answer():\n    os.kill(os.getppid(), signal.SIGKILL)\n    return 1",
        ERROR,
        WRONG,
    ),
    contained(
        "kills everybody",
        "import os, signal\ndef answer():\n    os.kill(-1, signal.SIGKILL)\n    return 1",
        ERROR,
        WRONG,
    ),
    contained(
        "kills its group",
        "import os, signal\ndef answer():\n    os.killpg(0, signal.SIGKILL)\n    return 1",
        ERROR,
        WRONG,
    ),
    contained("segmentation fault", "import ctypes\ndef answer():\n    ctypes.string_at(0)", ERROR),
    contained("aborts", "import os\ndef answer():\n    os.abort()", ERROR),
    Case(
        "daemon",
        "import os, time\ndef answer():\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n            while True:\n                time.sleep(1)\n        os._exit(0)\n    os.wait()\n    return 8675309",
        (PASSED,),
    ),
    Case(
        "threads that go on",
        "import threading\ndef spin():\n    while True:\n        pass\ndef answer():\n    threading.Thread(target=spin).start()\n    return 8675309",
        (PASSED, TIMEOUT),
    ),
]

READING = [
    blocked("password file", "return open('/etc/shadow').read()"),
    blocked("root's home", "return os.listdir('/root/.ssh')"),
    blocked("the project's files", f"return open({os.path.abspath(__file__)!r}).read()"),
    blocked("path traversal", "return open('../../../../../../etc/shadow').read()"),
    blocked("symbolic link", "os.symlink('/etc/shadow', 'link')\nreturn open('link').read()"),
    blocked("hard link", "os.link('/etc/passwd', 'link')\nreturn 'linked'"),
    blocked(
        "writes to Python's library", "open(os.path.join(os.path.dirname(os.__file__), 'os.py'), 'a')\nreturn 'opened'"
    ),
    blocked("writes to the root", "open('/evil', 'w')\nreturn 'opened'"),
    blocked("memory of the first process", "return open('/proc/1/mem', 'rb').read(1)"),
    blocked("environment of the first process", "return open('/proc/1/environ', 'rb').read()"),
    blocked("other processes", "return [p for p in os.listdir('/proc') if p.isdigit()] or open('/no')"),
    blocked("kernel settings", "open('/proc/sys/kernel/core_pattern', 'w')\nreturn 'opened'"),
    blocked("system tree", "return os.listdir('/sys/kernel')"),
    blocked("the supervisor's package", f"sys.path.append({os.getcwd()!r})\nimport upshot\nreturn 'imported'"),
    blocked("a device", "return os.open('/dev/mem', os.O_RDONLY) or os.open('/dev/sda', os.O_RDONLY)"),
    Case(
        "environment",
        "import os\ndef answer():\n    return [v for v in os.environ.values() if 'wombat' in v]",
        (PASSED,),
        ("assert answer() == []",),
    ),
    Case(
        "no other run's files",
        "import os, sys\ndef answer():\n    return [n for n in os.listdir('/tmp') if not sys.prefix.startswith('/tmp/' + n)]",
        (PASSED,),
        ("assert answer() == []",),
    ),
]

NETWORK = [
    blocked("loopback", "import socket\nsocket.create_connection(('127.0.0.1', int(PORT)), 1)\nreturn 'connected'"),
    blocked(
        "abstract socket", "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0' + NAME)\nreturn 'connected'"
    ),
    blocked(
        "datagram",
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))\nreturn 'sent'",
    ),
    blocked("raw socket", "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)\nreturn 'made'"),
    blocked("netlink", "import socket\nsocket.socket(16, socket.SOCK_RAW, 0)\nreturn 'made'"),
]

KERNEL = [
    policy("ptrace", "ptrace", "16, 1, 0, 0"),
    policy("process_vm_readv", "process_vm_readv"),
    policy("io_uring", "io_uring_setup", "8, 0"),
    policy("a file by its handle", "open_by_handle_at"),
    policy("the handle of a file", "name_to_handle_at"),
    policy("keyctl", "keyctl"),
    policy("add_key", "add_key"),
    policy("mount", "mount"),
    policy("umount", "umount2"),
    policy("chroot", "chroot", "b'/tmp'"),
    policy("pivot_root", "pivot_root"),
    policy("unshare", "unshare", "0x10000000"),
    policy("setns", "setns"),
    policy("setuid", "setuid", "0"),
    policy("setresuid", "setresuid", "0, 0, 0"),
    policy("bpf", "bpf"),
    policy("perf", "perf_event_open"),
    policy("userfaultfd", "userfaultfd"),
    policy("module", "init_module"),
    policy("reboot", "reboot"),
    policy("new namespaces by clone", "clone", "0x10000000 | 17, 0, 0, 0, 0"),
]

CHEATING = [
    contained("exit 0 while loading", "import sys\nsys.exit(0)", ERROR),
    contained("exit 0 in the call", "import sys\ndef answer():\n    sys.exit(0)", ERROR),
    contained("os._exit", "import os\nos._exit(0)", ERROR),
    contained("os._exit in the call", "import os\ndef answer():\n    os._exit(0)", ERROR),
    contained("exec", "import os\ndef answer():\n    os.execv('/bin/true', ['true'])", ERROR),
    contained(
        "always equal",
        "class E:\n    def __eq__(self, o):\n        return True\n    def __hash__(self):\n        return 0\ndef answer():\n    return E()",
        WRONG,
    ),
    contained(
        "an always equal integer",
        "class E(int):\n    def __eq__(self, o):\n        return True\n    __hash__ = int.__hash__\ndef answer():\n    return E(1)",
        WRONG,
    ),
    contained(
        "claims to be an integer",
        "class E:\n    __class__ = int\n    def __eq__(self, o):\n        return True\ndef answer():\n    return E()",
        WRONG,
    ),
    contained(
        "forged results",
        'import os\nfor fd in range(1, 64):\n    for line in (b\'{"p":true,"t":0}\\n\', b\'{"v":[1],"t":0}\\n\', b\'passed\\n\'):\n        try:\n            os.write(fd, line * 3)\n        except OSError:\n            pass\ndef answer():\n    os._exit(0)',
        WRONG,
        ERROR,
    ),
    contained(
        "result file overwritten",
        "import os\ndef answer():\n    for fd in range(3, 64):\n        try:\n            os.lseek(fd, 0, 0)\n            os.write(fd, b'{' * 9999)\n        except OSError:\n            pass\n    os._exit(0)",
        ERROR,
    ),
    contained(
        "patched builtins",
        "import builtins\nbuiltins.eval = lambda *a: 8\nbuiltins.isinstance = lambda *a: True\nbuiltins.type = lambda x: int\nbuiltins.len = lambda x: 0\ndef answer():\n    return 1",
        WRONG,
        ERROR,
    ),
    contained(
        "patched json",
        "import json, json.encoder, pickle\njson.dumps = lambda *a, **k: '{\"p\": true}'\njson.encoder.JSONEncoder.encode = json.dumps\npickle.dumps = json.dumps\ndef answer():\n    return 1",
        WRONG,
    ),
    contained(
        "patched write", "import os\nos.write = lambda fd, data: len(data)\ndef answer():\n    return 1", WRONG, ERROR
    ),
    contained(
        "import hooks",
        "import sys\nclass H:\n    def find_spec(self, *a):\n        sys.exit(0)\nsys.meta_path.insert(0, H())\nsys.modules.clear()\ndef answer():\n    return 1",
        WRONG,
        ERROR,
    ),
    Case(
        "walks frames and garbage",
        "import gc, sys\ndef answer():\n    seen = []\n    f = sys._getframe()\n    while f:\n        seen += list(f.f_locals.values()) + list(f.f_globals.values())\n        f = f.f_back\n    seen += gc.get_objects()\n    for o in list(seen):\n        try:\n            seen += gc.get_referents(o)\n        except Exception:\n            pass\n        if len(seen) > 200000:\n            break\n    return next((o for o in seen if type(o) is str and len(o) == 8 and o[:3] == 'z' + 'q-'), 0)",
        (WRONG, TIMEOUT),
        ("assert answer() == 'zq-73519'",),
    ),
    contained(
        "an exception that cannot be described",
        "class E(Exception):\n    def __str__(self):\n        raise SystemExit(0)\n    __repr__ = __str__\ndef answer():\n    raise E()",
        ERROR,
    ),
    contained(
        "an exception that never ends",
        "class E(Exception):\n    def __str__(self):\n        while True:\n            pass\ndef answer():\n    raise E()",
        TIMEOUT,
        ERROR,
    ),
    contained(
        "an exception whose class lies",
        "class M(type):\n    @property\n    def __name__(cls):\n        import os\n        os._exit(0)\nclass E(Exception, metaclass=M):\n    pass\ndef answer():\n    raise E()",
        ERROR,
    ),
    Case(
        "magic number",
        "class M:\n    def __sub__(self, o):\n        return 0.0\n    __rsub__ = __sub__\n    def __lt__(self, o):\n        return True\n    __gt__ = __le__ = __lt__\n    def __abs__(self):\n        return self\n    def __float__(self):\n        return 1.0\ndef root(x):\n    return M()",
        (ERROR, WRONG),
        ("assert abs(root(2) - 1.41421356) < 1e-6",),
    ),
    Case(
        "own isclose",
        "def isclose(a, b, **k):\n    return True\ndef root(x):\n    return 0",
        (WRONG, ERROR),
        ("assert isclose(root(2), 1.41421356)",),
    ),
    Case(
        "own numpy",
        "class np:\n    allclose = staticmethod(lambda *a, **k: True)\nallclose = np.allclose\ndef root(x):\n    return 0",
        (WRONG, ERROR, TIMEOUT),
        ("assert np.allclose(root(2), 1.41421356)", "assert allclose(root(2), 1.41421356)"),
    ),
    Case(
        "own statistics",
        "class statistics:\n    mean = staticmethod(lambda *a: 7.5)\ndef f(x):\n    return []",
        (ERROR, WRONG),
        ("assert statistics.mean(f(1)) == 15 / 2",),
    ),
    Case(
        "own abs",
        "import builtins\nabs = builtins.abs = lambda x: 0\ndef root(x):\n    return 0",
        (WRONG,),
        ("assert abs(root(2) - 1.41421356) < 1e-6",),
    ),
    Case(
        "equal in a loop",
        "class E:\n    def __eq__(self, o):\n        return True\ndef f(x):\n    return E()",
        (WRONG,),
        ("for i in range(3):\n    assert f(i) == i * 7",),
    ),
    Case(
        "leaves the judge alone",
        "import os\ndef f(x):\n    os._exit(0)",
        (ERROR,),
        ("for i in range(3):\n    assert f(i) == i * 7",),
    ),
    Case(
        "talks to the judge",
        "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'\\x02\\0\\0\\0{}' * 50)\n    except OSError:\n        pass\ndef f(x):\n    return 0",
        (WRONG, ERROR),
        ("for i in range(3):\n    assert f(i) == i * 7 + 1",),
    ),
]

CASES = EXHAUSTION + SIGNALS + READING + NETWORK + KERNEL + CHEATING


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    made = make_box(require="namespaces")
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def temptations() -> Any:
    """A secret in the environment, listeners on loopback and on an abstract socket."""
    os.environ["WOMBAT"] = SECRET
    tcp = socket.create_server(("127.0.0.1", 0))
    name = f"upshot-{os.getpid()}"
    unix = socket.socket(socket.AF_UNIX)
    unix.bind("\0" + name)
    unix.listen()
    yield {"PORT": str(tcp.getsockname()[1]), "NAME": name}
    tcp.close()
    unix.close()
    del os.environ["WOMBAT"]


def fill(program: str, temptations: dict[str, str]) -> str:
    """Insert the listeners' addresses."""
    return program.replace("int(PORT)", temptations["PORT"]).replace("NAME)", repr(temptations["NAME"]) + ")")


def test_there_are_at_least_forty() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_a_hostile_program_is_contained(case: Case, box: Any, temptations: dict[str, str]) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    limits = replace(QUICK, wall_seconds=case.wall_seconds)
    results = box(box.sandbox.test_program(fill(case.program, temptations), case.tests, limits=limits))
    outcomes = [result.outcome for result in results]
    allowed = {*case.allowed, *([Outcome.UNCONFIRMED] if WRONG in case.allowed else [])}  # which is not a pass either
    assert all(outcome in allowed for outcome in outcomes), results
    assert box.strangers() == []
    honest = box(box.sandbox.test_program(HONEST, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]))
    assert [result.outcome for result in honest] == [PASSED, WRONG]
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 8  # zygotes started in the meantime hold a socket each


def test_a_run_does_not_see_another_runs_files(box: Any) -> None:
    box(box.sandbox.run("open('/tmp/secret', 'w').write('x')"))
    result = box(
        box.sandbox.run(
            "import os, sys; print([n for n in os.listdir('/tmp') if not sys.prefix.startswith('/tmp/' + n)])"
        )
    )
    assert result.stdout.strip() == "['program.py']" or result.stdout.strip() == "[]"


def test_file_names_cannot_leave_the_working_directory(box: Any) -> None:
    for name in ("../evil", "/tmp/../evil", "a/../../evil"):
        result = box(box.sandbox.run("print(1)", files={name: b"x"}))
        assert result.outcome is ERROR and "leaves the working directory" in result.stderr


def test_stdio_expected_output_is_not_in_the_process(box: Any) -> None:
    program = "import gc\nprint([o for o in gc.get_objects() if isinstance(o, (list, dict)) and 'quo' + 'kka' in str(o)][:1] and 'quo' + 'kka')"
    results = box(box.sandbox.test_stdio(program, [StdioTest("", "quokka")]))
    assert results[0].outcome is not PASSED


def test_many_hostile_programs_at_once_do_not_change_verdicts_on_honest_ones(box: Any) -> None:
    import asyncio

    async def storm() -> list[Any]:
        hostile = [box.sandbox.test_program(case.program, case.tests) for case in CHEATING[:8]]
        honest = [box.sandbox.test_program(HONEST, [f"assert add({i}, 1) == {i + 1}"]) for i in range(16)]
        return (await asyncio.gather(*hostile, *honest))[len(hostile) :]

    assert all(results[0].outcome is PASSED for results in box(storm()))
    assert threading.active_count() < 20
