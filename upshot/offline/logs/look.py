"""`upshot logs look FILES…`: what the logs contain and what correlates with their outcome, as a table and a page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError
from upshot.core.files import check_writable
from upshot.offline.logs.page import counts, side, spread, write_page
from upshot.offline.logs.read import USUAL, LogReader
from upshot.offline.logs.signs import Survey


def reader_of(args: argparse.Namespace) -> LogReader:
    """The reader that the options describe."""
    roles = {}
    for pair in filter(None, (args.roles or "").split(",")):
        name, _, role = pair.partition("=")
        if role not in ("user", "assistant", "tool", "system"):
            raise UserError(f"--roles '{pair}' should read NAME=ROLE, with the role user, assistant, tool or system")
        roles[name.strip().lower()] = role
    fields = {name: getattr(args, name) for name in USUAL}
    return LogReader(args.files, fields, roles, args.keep_personal, args.quiet or args.json)


def run(args: argparse.Namespace) -> int:
    """Read, print and write the page; 1 if there is no conversation at all."""
    reader, survey, out = reader_of(args), Survey(), Path(args.out or "logs.html")
    check_writable(out)
    for talk in reader:
        survey.add(talk)
    numbers = survey.to_dict()
    write_page(out, reader.account(), survey=numbers, telling=survey.telling())
    if args.json:
        print(json.dumps({"records": reader.records, **numbers, "account": reader.account(), "page": str(out)}))
    else:
        print_survey(numbers, reader.account(), reader.records)
        print(f"the page, with the most telling conversations: {out}")
    return 0 if survey.conversations else 1


def print_survey(survey: Any, account: list[str], records: int) -> None:
    """The survey as tables on a terminal."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    outcome = spread(survey["outcome"])
    console.print(f"{survey['conversations']:,} conversations of {records:,} records; outcome {outcome}")
    for name, mean in survey["sizes"].items():
        console.print(f"  {name}: {spread(mean)}")
    console.print(f"  languages: {counts(survey['languages'])}")
    table = Table("the assistant", "share", "outcome with it", "outcome without", "difference", box=SIMPLE)
    for name, sign in survey["signs"].items():
        share = f"{sign['share'].get('value', 0.0):.1%}"
        table.add_row(name, share, spread(sign["with"]), spread(sign["without"]), side(sign))
    console.print(table)
    for line in account:
        console.print(line, style="yellow", soft_wrap=True)
