"""Look at runs in a browser: curves, conversations, comparison; live, or as one file.

Serve a page on run folders: curves, conversation trees, credit on the text, comparison of runs. It follows runs while
they train, only reads their files, and stops with Ctrl-C. With --out the same page is written as one file that needs no
server.
"""

from __future__ import annotations

import argparse

from upshot.cli.options import add_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("folders", metavar="RUN", nargs="*", help="run folders, or folders that contain some (default: runs)")
    add("--out", metavar="FILE", nargs="?", const="", help="write one file and exit (without FILE: RUN/report.html)")
    address = {"help": "address to listen on; beyond loopback the page's address contains a token"}
    add_options(parser, "host", "port", host=address, port={"default": 0, "help": "port (default: any free one)"})
    add("--no-open", action="store_true", help="do not open a browser")


def run(args: argparse.Namespace) -> int:
    """Serve or write the page, print where it is, and open it when a person is watching."""
    import sys
    from pathlib import Path

    def tell(address: str) -> None:
        print(address, flush=True)
        if not args.no_open and sys.stdout.isatty():
            import webbrowser

            webbrowser.open(address)

    folders = [Path(folder) for folder in args.folders or ["runs"]]
    if args.out is not None:
        from upshot.run.report.report import write_report

        print(write_report(folders, Path(args.out) if args.out else None))
        return 0
    from upshot.run.report.server import serve

    serve(folders, args.host, args.port, tell)
    return 0
