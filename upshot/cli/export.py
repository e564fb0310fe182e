"""`upshot export RUN`: a checkpoint as a Hugging Face folder with a model card, merged or pushed if asked."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "export",
        help="write a trained model as a Hugging Face folder",
        description="Write a checkpoint of a run as a Hugging Face folder with a model card: recipe, results and data. "
        "Adapters stay adapters unless --merge puts them into their base model, in its type.",
    )
    parser.add_argument("folder", metavar="RUN", help="a run folder, or FSDP shards that verl saved elsewhere")
    parser.add_argument(
        "--checkpoint",
        metavar="N",
        default="",
        help="a step, a name such as rl-000040, best or last; left out: best where it was kept, else last",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        default="",
        help="of shards that verl saved elsewhere: the folder or hub name of what they were made from",
    )
    parser.add_argument("--merge", action="store_true", help="put adapters into their base model")
    parser.add_argument("--push", metavar="NAME", help="upload to this (private) repository of the Hugging Face hub")
    parser.add_argument("--out", metavar="FOLDER", help="write here instead of RUN/export-CHECKPOINT")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the folder, push it if asked, print where it is."""
    from pathlib import Path

    from upshot.run.export import export, push
    from upshot.run.folder import RECIPE, RunFolder
    from upshot.verl.checkpoints import export_shards, find_shards, is_verl, make_whole

    place, out = Path(args.folder), Path(args.out) if args.out else None
    shards = None if (place / RECIPE).is_file() else find_shards(place, args.checkpoint)
    if shards is not None:
        out = out or shards / "merged"
        export_shards(shards, args.model, args.merge, out)
    else:
        folder = RunFolder.open(place)
        if is_verl(folder):
            make_whole(folder, args.checkpoint)
        out = export(folder, args.checkpoint, args.merge, out)
    print(out)
    if args.push:
        print(push(out, args.push))
    return 0
