"""`upshot cache`: what the response cache holds, and emptying it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from upshot.models.client.cache import ResponseCache


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("cache", help="count or clear the responses of models kept on disk")
    verbs = parser.add_subparsers(dest="cache_verb", required=True, metavar="stats|clear")
    stats = verbs.add_parser("stats", help="completions and bytes by model")
    stats.add_argument("--json", action="store_true", help="for programs")
    clear = verbs.add_parser("clear", help="remove stored completions")
    clear.add_argument("--model", help="only those of this model, as `stats` names it")
    for verb in (stats, clear):
        verb.add_argument("--folder", help="the cache's folder (default: $UPSHOT_CACHE, else ~/.cache/upshot)")
        verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do what was asked."""
    from upshot.models.client.cache import ResponseCache

    cache = ResponseCache.open(args.folder or True)
    try:
        return _stats(cache, args.json) if args.cache_verb == "stats" else _clear(cache, args.model)
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
