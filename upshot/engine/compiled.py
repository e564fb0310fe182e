"""Decode steps compiled while eager ones serve, for models without the fused block.

`Compiler` waits until a run has shown that it is long, looks for the compiled step on disk, else has another process
compile it (tracing.py), and loads it in a thread. The runner asks `ready` between two steps and changes over only after
the compiled step has computed the same logits as the eager one. Whatever fails is said once, and eager steps go on.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from upshot.engine.attention import Step, driving
from upshot.engine.driver import Driver

AFTER = 256
"""Decode steps before anything is compiled: a shorter run would not get its time back."""
KEEP = 32
"""Compiled steps kept on disk, the last used."""
TIMEOUT_S = 900.0
PASSING = (
    *("training", "_hooks", "_attn_implementation", "_attn_implementation_internal"),
    *("name_or_path", "_commit_hash", "generation_config"),
)
"""Attributes (by their ends) that differ between two uses of the same model."""
Run = Callable[..., Any]


class CompiledDriver:
    """The compiled step where it applies; everything else by the driver it replaces."""

    def __init__(self, inner: Driver, run: Run) -> None:
        from upshot.engine.tracing import LEAST, MOST

        self.inner, self.shape, self.lm = inner, inner.shape, inner.lm
        self._run = run
        self._least, self._most = LEAST, MOST
        self._places = list(_places(self.lm))
        self._structure = structure(self.lm)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, step: Step, last: torch.Tensor | None) -> torch.Tensor:
        """Logits of the tokens at the indices `last` (None: all)."""
        if last is not None or not self._least <= len(ids) <= self._most:
            return self.inner.logits(ids, positions, step, last)
        live = [holder[name] for holder, name in self._places]
        with driving([], [], step):
            return self._run(ids, positions, *live)[0]

    def stale(self) -> bool:
        """Whether modules or adapters are others than when the step was compiled."""
        return structure(self.lm) != self._structure

    def refresh(self) -> None:
        """The weights changed."""
        if hasattr(self.inner, "refresh"):
            self.inner.refresh()


def _places(lm: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Where each input of the graph lives, so that a parameter that is put in its place is found."""
    from upshot.engine.tracing import inputs_of

    modules = dict(lm.named_modules())
    for path in inputs_of(lm):
        owner, _, name = path.rpartition(".")
        module = modules[owner]
        yield (module._parameters if name in module._parameters else module._buffers), name


def structure(lm: torch.nn.Module) -> list[Any]:
    """What must stay the same for a traced forward to stay true: the modules, and which adapters are on."""
    flags = ("merged", "disable_adapters", "active_adapters", "scaling")
    tuned = [m for m in lm.modules() if hasattr(type(m), "disable_adapters")]  # looked up in the class: it is quicker
    return [
        *((name, type(m)) for name, m in lm.named_modules()),
        *(repr(getattr(m, flag, None)) for m in tuned for flag in flags),
    ]


class Compiler:
    """Has a model's decode step compiled, beside the steps that are served meanwhile."""

    def __init__(self, driver: Driver, after: int | None = None) -> None:
        self.driver = driver
        self.steps_left = AFTER if after is None else after
        self.seconds = 0.0
        """From the start of the work to the loaded step."""
        self.cached = False
        """The step was on disk already."""
        self.details: dict[str, float] = {}
        self.state = "waiting"
        """waiting, compiling, loaded, done (handed over) or failed."""
        self.reason = ""
        self._run: Run | None = None
        self._structure: list[Any] = []
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pending(self) -> bool:
        """A compiled step may still come."""
        return self.state in ("compiling", "loaded")

    def ready(self) -> CompiledDriver | None:
        """Called before every decode step: starts the work when it is time; once, the compiled driver."""
        if self.state == "waiting":
            self.steps_left -= 1
            if self.steps_left < 0:
                self.start()
        if self.state == "failed" and self.reason:
            self.fail(self.reason)
        if self.state != "loaded" or self._run is None:
            return None
        if structure(self.driver.lm) != self._structure:  # adapters came or went meanwhile
            self.state, self.steps_left = "waiting", AFTER
            return None
        self.state = "done"
        return CompiledDriver(self.driver, self._run)

    def start(self) -> None:
        """Begin now."""
        if self.state != "waiting":
            return
        self.state = "compiling"
        began = time.perf_counter()
        try:  # here and not in the thread: between two steps the model is nobody's
            from upshot.engine.tracing import without_weights

            lm = self.driver.lm
            self._structure = structure(lm)
            key, model = key_of(lm, self.driver.shape.device), without_weights(lm)
        except Exception as error:  # any object a model carries may refuse to be pickled, in its own way
            self.fail(f"the model cannot be handed to another process ({type(error).__name__}: {error})")
            return
        self._thread = threading.Thread(target=self._work, args=(key, model, began), name="upshot-compile", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float = TIMEOUT_S) -> bool:
        """Start if need be and wait; whether a compiled step is loaded (benchmarks, tests)."""
        self.start()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.state in ("loaded", "done")

    def fail(self, reason: str) -> None:
        """Stay with eager steps, and say why."""
        self.state, self.reason, self._run = "failed", "", None
        warnings.warn(f"decode steps stay uncompiled: {reason}", stacklevel=2)

    def close(self) -> None:
        """Stop the process, if one is at work."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _work(self, key: str, model: bytes, began: float) -> None:
        """In the thread. It never touches the model, and no warning leaves it: `ready` says what it left."""
        try:
            artefact = folder() / f"{key}.bin"
            self.cached = artefact.exists()
            if not self.cached:
                self.details = self._compile(model, artefact)
            with _patient():
                self._run = _load_or_drop(artefact, self.driver.shape.device)
            _prune(artefact.parent)
            self.seconds = time.perf_counter() - began
            self.state = "loaded"
        except Exception as error:  # a compiler fails in more ways than can be listed; none may reach the run
            self.reason = f"{type(error).__name__}: {error}"
            self.state = "failed"

    def _compile(self, model: bytes, artefact: Path) -> dict[str, float]:
        """Let another process compile, so that this one's interpreter stays with the steps."""
        with tempfile.TemporaryDirectory(prefix="upshot-compile-") as home:
            request = Path(home) / "request"
            ask = {"model": model, "device": str(self.driver.shape.device), "artefact": str(artefact)}
            request.write_bytes(pickle.dumps(ask))
            environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
            environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
            environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, min(8, (os.cpu_count() or 2) // 2))))
            command = "import sys; from upshot.engine.tracing import main; main(sys.argv[1])"
            self._process = subprocess.Popen(
                [sys.executable, "-c", command, str(request)],
                stdin=subprocess.PIPE,  # stays open: its closing is how the process learns that we are gone
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
            )
            atexit.register(self.close)
            try:
                out, errors = _communicate(self._process)
            finally:
                self.close()
                atexit.unregister(self.close)
            if self._process.returncode != 0:
                raise RuntimeError(f"the compiling process failed: {_what(errors, self._process.returncode)}")
            return dict(json.loads(out.decode().strip().splitlines()[-1]))


def _what(errors: bytes, code: int) -> str:
    """The line of an error output that says most."""
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.split(":")[0]]
    return (named or lines or [f"it ended with {code} and no message"])[-1][:500]


def _communicate(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """All output, without closing the process's input (`Popen.communicate` would)."""
    assert process.stdout is not None and process.stderr is not None and process.stdin is not None
    errors: list[bytes] = []
    stderr = process.stderr
    reader = threading.Thread(target=lambda: errors.append(stderr.read()), daemon=True)
    reader.start()
    alarm = threading.Timer(TIMEOUT_S, process.kill)
    alarm.daemon = True
    alarm.start()
    try:
        out = process.stdout.read()
        reader.join()
        process.wait()
    finally:
        alarm.cancel()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
    return out, b"".join(errors)


@contextmanager
def _patient() -> Iterator[None]:
    """Inside: this thread gives the interpreter up sooner, since loading is mostly Python."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, 5e-4))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def load(artefact: Path, device: torch.device) -> Run:
    """The compiled step in a file."""
    import torch._inductor

    import upshot.engine.tracing  # noqa: F401 - the operator in the graph

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        run = torch._inductor.CompiledArtifact.load(path=str(artefact), format="binary")
    os.utime(artefact)
    return run


def _load_or_drop(artefact: Path, device: torch.device) -> Run:
    """Load a file; one that cannot be loaded is removed, so that the next run compiles it anew."""
    try:
        return load(artefact, device)
    except Exception:
        artefact.unlink(missing_ok=True)
        raise


# --- on disk


def folder() -> Path:
    """Where compiled steps are kept: `$XDG_CACHE_HOME/upshot/compiled`, for this user only (they are code)."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "upshot" / "compiled"
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    return home


def _prune(home: Path) -> None:
    """Remove all but the last used."""
    kept = sorted(home.glob("*.bin"), key=lambda p: p.stat().st_mtime, reverse=True)
    for path in kept[KEEP:]:
        path.unlink(missing_ok=True)


def key_of(lm: torch.nn.Module, device: torch.device) -> str:
    """Names what a compiled step depends on: code, versions, device, modules and their settings; not the weights."""
    from upshot.engine import attention, tracing

    digest = hashlib.sha256()
    parts = [sys.version, torch.__version__, device.type, str(tracing.OPTIONS)]
    if device.type == "cuda":
        parts += [torch.cuda.get_device_name(device), str(torch.version.cuda)]
    classes = {type(m) for m in lm.modules()}
    files = {attention.__file__, tracing.__file__, *(inspect.getsourcefile(c) or c.__qualname__ for c in classes)}
    for file in sorted(files):
        parts.append(hashlib.sha256(Path(file).read_bytes()).hexdigest() if Path(file).is_file() else file)
    seen: dict[int, str] = {}
    for name, module in lm.named_modules():
        state = {k: v for k, v in vars(module).items() if k != "_modules" and not k.endswith(PASSING)}
        parts.append(f"{name} {type(module).__qualname__} {_described(state, seen, 0)}")
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _described(value: Any, seen: dict[int, str], depth: int) -> str:
    """A value as text that is the same in every process."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}"
    if isinstance(value, str | int | float | bool | bytes | torch.dtype | torch.device) or value is None:
        return repr(value)
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{k!r}:{_described(v, seen, depth + 1)}" for k, v in value.items())) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_described(v, seen, depth + 1) for v in value) + "]"
    if isinstance(value, set | frozenset):
        return "{" + ",".join(sorted(_described(v, seen, depth + 1) for v in value)) + "}"
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, torch.nn.Module | type) or callable(value) or depth > 6:
        return name
    if id(value) not in seen:
        seen[id(value)] = name  # a value that holds itself ends here
        state = {k: v for k, v in getattr(value, "__dict__", {}).items() if not k.endswith(PASSING)}
        seen[id(value)] = f"{name}{_described(state, seen, depth + 1)}"
    return seen[id(value)]
