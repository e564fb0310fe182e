"""Where a server listens: checked before anything slow is loaded."""

from __future__ import annotations

import argparse
import socket

from upshot.core.errors import UserError


def port(text: str) -> int:
    """A port number, for argparse."""
    if not text.isdecimal() or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(f"'{text}' is no port; give a number from 0 (any free one) to 65535")
    return int(text)


def check_address(host: str, number: int) -> None:
    """Refuse an address that this machine does not have, or a port that is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{number}: {error.strerror}; try another --port or --host") from error
