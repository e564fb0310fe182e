"""`upshot view RUN…`: the page over run folders, live; or as one file."""

from __future__ import annotations

import argparse

from upshot.cli.options import port


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "view",
        help="look at runs: curves, conversations, comparison; live, or as one file",
        description="Serve the page over run folders: curves, conversation trees, credit on the text, comparison of "
        "runs. It follows runs that train, reads their files only, and stops with Ctrl-C. With --out the same page is "
        "written as one file that needs no server.",
    )
    parser.add_argument("folders", metavar="RUN", nargs="*", help="run folders, or folders of them (default: runs)")
    parser.add_argument(
        "--out", metavar="FILE", nargs="?", const="", help="write one file and end (without FILE: RUN/report.html)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="beyond loopback the address holds a token")
    parser.add_argument("--port", type=port, default=0, help="default: any free one")
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    parser.set_defaults(run=run)


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

        page = write_report(folders, Path(args.out) if args.out else None)
        print(page)
        return 0
    from upshot.run.report.server import serve

    serve(folders, args.host, args.port, tell)
    return 0
