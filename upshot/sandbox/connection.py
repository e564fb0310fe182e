"""Makes a runner from a name or a URL in a recipe."""

from __future__ import annotations

import os

from upshot.core.errors import UserError
from upshot.sandbox.limits import Limits
from upshot.sandbox.runner import CodeRunner

KEY_VARIABLE = "UPSHOT_SANDBOX_KEY"
FORMS = (
    "local, local:slots=2, http://host:port, opencode+http://host:port, fusion+http://host:port, subprocess (unsafe)"
)


def connect(spec: str, limits: Limits | None = None, api_key: str | None = None) -> CodeRunner:
    """The runner that a spec names; use it with `async with`, or call `aclose` at the end."""
    key = api_key or os.environ.get(KEY_VARIABLE)
    kind, _, rest = spec.partition(":")
    if kind == "local":
        return _local(rest, limits)
    if spec == "subprocess":
        from upshot.sandbox.local.script_runner import BareRunner

        return BareRunner(limits=limits)
    prefix, _, url = spec.rpartition("+")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"unknown sandbox '{spec}'; give one of: {FORMS}")
    from upshot.sandbox.http import clients as http

    clients = {"upshot": http.UpshotRunner, "opencode": http.CompatibleRunner, "fusion": http.FusionRunner}
    client = clients.get(prefix or "upshot")
    if client is None:
        raise UserError(f"unknown sandbox kind '{prefix}' in '{spec}'; give one of: {FORMS}")
    return client(url, key, limits)


def _local(options: str, limits: Limits | None) -> CodeRunner:
    from upshot.sandbox.local.pool import Sandbox

    slots: int | None = None
    require: list[str] = []
    for option in filter(None, options.split(",")):
        name, _, value = option.partition("=")
        if name == "slots" and value.isdigit():
            slots = int(value)
        elif name == "require" and value:
            require += value.split("+")
        else:
            raise UserError(
                f"unknown option '{option}' in sandbox 'local:{options}'; known: slots=N, require=namespaces+landlock"
            )
    return Sandbox(slots=slots, require=require, limits=limits)
