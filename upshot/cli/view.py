"""`upshot view RUN`: write the report of a run folder and show it."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "view",
        help="write the report page of a run folder",
        description="Write report.html for a run folder: curves, conversation trees, reward breakdown, missing counts.",
    )
    parser.add_argument("folder", metavar="RUN", help="a run folder, or a folder of run folders to lay side by side")
    parser.add_argument("--out", metavar="FILE", help="write the page here instead of RUN/report.html")
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page, print its path, and open it when a person is watching."""
    import sys
    from pathlib import Path

    from upshot.run.report.report import write_report

    page = write_report(Path(args.folder), Path(args.out) if args.out else None)
    print(page)
    if not args.no_open and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
    return 0
