"""The process that worker processes are forked from, and what a worker does. Standard library only, no threads.

Started as `python -m upshot.tasks.verifiers.nursery FD`. It imports what verifiers need once (sympy takes a second) and
forks on request, so replacing a killed worker takes milliseconds. A plain fork of the training process would copy its
threads' locks, hence a process of its own. Requests are single JSON lines on a socket; a fork request carries the
worker's own socket. When the socket closes, the nursery ends, and its workers with it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any

from upshot.core.process import die_with_parent
from upshot.core.score import Reason, Score

HEADER = struct.Struct("!I")
MAX_MESSAGE = 64 * 2**20


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """`size` bytes, or b'' when the other side is gone."""
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(size - len(parts), 1 << 20))
        if not part:
            return b""
        parts += part
    return bytes(parts)


def frame(message: Any) -> bytes:
    """A message with its length in front."""
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


def serve(sock: socket.socket) -> None:
    """A worker's life: read a claim, verify it, answer; until the socket closes or memory runs out."""
    while header := receive_exactly(sock, HEADER.size):
        claim = json.loads(receive_exactly(sock, HEADER.unpack(header)[0]))
        answer = check_claim(claim)
        sock.sendall(frame(answer))
        if answer.get("reason") == Reason.CRASHED:
            return


def check_claim(claim: dict[str, Any]) -> dict[str, Any]:
    """The score of a claim as JSON; whatever the verifier raises becomes a missing score with the reason."""
    try:
        given = _verifier(claim["source"], claim["options"]).score(
            claim["response"], claim["reference"], claim["extra"]
        )
        answer = _as_json(Score.of(given, f"verifier '{claim['source']}'"))
        json.dumps(answer)  # a detail that is not JSON must fail here, as this item's own error
    except MemoryError:
        return _as_json(Score.missing(Reason.CRASHED, "verifier: out of memory"))
    except Exception as error:  # an item's failure is its own: reported, counted, never fatal
        return _as_json(Score.failed(error, "verifier"))
    return answer


def _as_json(score: Score) -> dict[str, Any]:
    return {"value": score.value, "reason": score.reason, "detail": dict(score.detail)}


_BUILT: dict[str, Any] = {}


def _verifier(source: str, options: dict[str, Any]) -> Any:
    from upshot.tasks.verifiers.base import verifiers

    key = json.dumps([source, options], sort_keys=True)
    if key not in _BUILT:
        _BUILT[key] = verifiers.create(source, options)
    return _BUILT[key]


def _warm(request: dict[str, Any]) -> dict[str, Any]:
    try:
        verifier = _verifier(request["source"], request["options"])
        verifier.warm()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    gc.collect()
    gc.freeze()  # keeps the collector from copying the shared pages of every worker
    return {}


def _fork(control: socket.socket, fd: int, memory_mb: int) -> int:
    pid = os.fork()
    if pid:
        os.close(fd)
        return pid
    code = 1
    try:
        control.close()
        die_with_parent()
        _limit(memory_mb)
        with socket.socket(fileno=fd) as sock:
            serve(sock)
        code = 0
    finally:
        os._exit(code)


def _limit(memory_mb: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # a lower hard limit is already in force: keep it
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20, memory_mb * 2**20))


def main(fd: int) -> None:
    """Answer fork, warm and reap requests until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    die_with_parent()
    control = socket.socket(fileno=fd)
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not data:
            return
        request = json.loads(data)
        if request["op"] == "fork":
            answer: dict[str, Any] = {"pid": _fork(control, fds[0], request["memory_mb"])}
        elif request["op"] == "reap":
            with contextlib.suppress(ProcessLookupError):
                os.kill(request["pid"], signal.SIGKILL)
            answer = {"status": os.waitpid(request["pid"], 0)[1]}
        else:
            answer = _warm(request)
        control.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    # A worker must find the same modules as the program that started it.
    sys.path[:] = json.loads(os.environ.pop("UPSHOT_NURSERY_PATH", "null")) or sys.path
    main(int(sys.argv[1]))
