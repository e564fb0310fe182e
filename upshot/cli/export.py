"""Write a trained model as a Hugging Face folder.

Write a checkpoint of a run as a Hugging Face folder with a model card (recipe, results, data). Adapters stay adapters
unless --merge puts them into their base model, in its data type.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("folder", metavar="RUN", help="a run folder, or FSDP shards that verl saved without us")
    steps = "a step, a name such as rl-000040, best or last (default: best if it was kept, else last)"
    add("--checkpoint", metavar="N", default="", help=steps)
    base = "for shards that verl saved without us: the folder or Hub name of the model they were made from"
    add("--model", metavar="MODEL", default="", help=base)
    add("--merge", action="store_true", help="put adapters into their base model")
    add("--push", metavar="NAME", help="upload to this private repository on the Hugging Face Hub")
    add("--out", metavar="FOLDER", help="write here instead of RUN/export-CHECKPOINT")


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
