"""Count or clear model responses kept on disk."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from upshot.cli.options import add_parts

if TYPE_CHECKING:
    from upshot.models.client.cache import ResponseCache

FOLDER = "folder of the cache (default: $UPSHOT_CACHE, else ~/.cache/upshot)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verbs below it."""
    add_parts(parser, stats=add_stats, clear=add_clear)


def add_stats(parser: argparse.ArgumentParser) -> None:
    """Show completions and bytes by model."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--folder", help=FOLDER)
    parser.set_defaults(work=lambda cache, args: _stats(cache, args.json))


def add_clear(parser: argparse.ArgumentParser) -> None:
    """Remove stored completions."""
    parser.add_argument("--model", help="only completions of this model, as named by `stats`")
    parser.add_argument("--folder", help=FOLDER)
    parser.set_defaults(work=lambda cache, args: _clear(cache, args.model))


def run(args: argparse.Namespace) -> int:
    """Do what was asked."""
    from upshot.models.client.cache import ResponseCache

    cache = ResponseCache.open(args.folder or True)
    try:
        return int(args.work(cache, args))
    finally:
        cache.close()


def _stats(cache: ResponseCache, as_json: bool) -> int:
    models = cache.summary()
    if as_json:
        import json

        listed = [{"model": name, "completions": count, "bytes": size} for name, count, size in models]
        print(json.dumps({"file": str(cache.path), "models": listed}))
        return 0
    print(cache.path)
    for name, count, size in models:
        print(f"  {count:>9,} completions  {size / 1e6:>9.2f} MB  {name}")
    if not models:
        print("  empty")
    return 0


def _clear(cache: ResponseCache, model: str | None) -> int:
    if model is not None:
        from upshot.core.errors import UserError, did_you_mean

        known = [name for name, _, _ in cache.summary()]
        if model not in known:
            raise UserError(f"the cache {cache.path} has nothing of '{model}'; {did_you_mean(model, known)}")
    gone = cache.clear(model)
    print(f"removed {gone:,} completion{'' if gone == 1 else 's'} from {cache.path}")
    return 0
