"""Everybody but the policy: metrics that need a judge, keys, and endpoints, each asked for a few tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from pathlib import Path

from upshot.config.model_spec import HTTP, ModelSpec
from upshot.config.recipe import Recipe
from upshot.config.sampling import Sampling
from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.core.event_loop import run_anywhere
from upshot.models.base import ModelCallError, Request
from upshot.models.client.budget import Budget
from upshot.models.connect import connect
from upshot.models.endpoint import headers_of
from upshot.models.scripted import AbsentPolicy
from upshot.rollout.futures.classmates.map_file import read_map
from upshot.rollout.play import has_opening
from upshot.rollout.services import build_services
from upshot.run.checks.context import CheckContext, Finding, is_here
from upshot.serving.servers.state import folder_of, read_state, ready, served_name, with_addresses

ATTEMPTS, SECONDS, TOKENS = 2, 30.0, 16
"""Of the call that an endpoint is tried with."""
FINE = ("refused", "too_long", "http_400", "http_422")
"""Answers of an endpoint that is there: it did not like this question."""
HEALTH_SECONDS = 5.0
NOT_YET = "http://127.0.0.1:1/v1"


def check(context: CheckContext) -> Iterator[Finding]:
    """Build everybody, as the run would, and try every endpoint at once."""
    if not context.sampled:
        return
    recipe, later = _with_servers(context.recipe)
    services = build_services(recipe, context.task, AbsentPolicy(), None)
    openings = [] if services.user is not None else context.task.rows("train")
    silent = [row.id for row in openings if row.goal and not has_opening(row)]
    if silent:
        says = f"{len(silent)} rows (such as '{silent[0]}') have a goal but no message, and no user to open"
        yield Finding(f"{says}; set futures.user")
    served = read_map(recipe.futures.map_file)[0] if recipe.futures.map_file is not None else {}
    models = {name: ModelSpec.parse(m, f"models.{name}") for name, m in {**served, **recipe.needed_models}.items()}
    specs = {spec.model_dump_json(): spec for role, spec in models.items() if role not in later}
    tries = [_try_model(spec, recipe, context.offline) for spec in specs.values()]
    tries += [_try_tokenizer(name, file, context.offline) for name, file in _tokenizers(recipe).items()]
    if not context.offline:
        tries += [_try_server(what, url) for what, url in list_servers(recipe).items()]

    async def all_of_them() -> list[str | None]:
        async with aclosing(services):
            return await asyncio.gather(*tries)

    yield from (Finding(says) for says in run_anywhere(all_of_them()) if says)


def _with_servers(recipe: Recipe) -> tuple[Recipe, set[str]]:
    """The recipe with the addresses of its serve file's servers, and the models that cannot be tried yet.

    Servers that are not up are the run's own to start; until then their models have an address that nobody calls.
    """
    served = {role: name for role, spec in recipe.models.items() if (name := served_name(spec)) is not None}
    if recipe.serve is None or ready(read_state(folder_of(recipe.serve))):
        return recipe.model_copy(update={"models": with_addresses(recipe.serve, recipe.models)}), set()
    later = {role: recipe.models[role].model_copy(update={"url": NOT_YET, "model": served[role]}) for role in served}
    return recipe.model_copy(update={"models": {**recipe.models, **later}}), set(later)


def _tokenizers(recipe: Recipe) -> dict[str, str]:
    """The tokenizers that classmates behind endpoints are read with, by classmate."""
    named = recipe.futures.options.get("classmates") or []
    if recipe.futures.map_file is not None:
        named = [{"name": one.name, "tokenizer": one.tokenizer} for one in read_map(recipe.futures.map_file)[1]]
    entries = [entry for entry in named if isinstance(entry, Mapping) and entry.get("tokenizer")]
    return {str(entry["name"]): str(entry["tokenizer"]) for entry in entries}


def list_servers(recipe: Recipe) -> dict[str, str]:
    """Servers of ours that the run needs, by the recipe's field."""
    addresses = {"sandbox": recipe.sandbox, "reward.manager.url": str(recipe.reward.manager.options.get("url", ""))}
    return {what: url for what, url in addresses.items() if url.startswith(HTTP)}


async def _try_model(spec: ModelSpec, recipe: Recipe, offline: bool) -> str | None:
    """What is wrong with a helper model; None when it answers, or is there to be loaded."""
    try:
        if spec.kind == "local":
            is_here(spec.model, "the model", offline)
        elif spec.kind == "endpoint" and offline:
            headers_of(spec)
        elif spec.kind != "policy":
            await _ask(spec, recipe, offline or spec.kind == "scripted")
    except UserError as error:
        return str(error)
    except ModelCallError as error:
        if error.reason not in FINE:
            return f"'{spec.label}' does not answer: {error}"
    return None


async def _try_tokenizer(classmate: str, name: str, offline: bool) -> str | None:
    """Why the tokenizer of a classmate cannot be had; None when it can, or when the hub is not asked."""
    if (Path(name).expanduser() / "tokenizer_config.json").is_file():
        return None  # a folder that may hold a tokenizer and no model
    try:
        is_here(name, f"the tokenizer of classmate '{classmate}'", offline)
    except UserError as error:
        return f"{error}, or give its entry `tokenizer: FOLDER`"
    return None


async def _ask(spec: ModelSpec, recipe: Recipe, silent: bool) -> None:
    """Start a model as the run would, and unless `silent` ask it for a few tokens."""
    brief = {"retries": ATTEMPTS - 1, "timeout_s": min(SECONDS, spec.timeout_s), "patience_s": SECONDS}
    tried = spec.model_copy(update={**brief, "max_tokens": TOKENS, "cache": False})
    async with connect(tried, role="check", budget=Budget(max_dollars=recipe.budget.max_dollars)) as model:
        if not silent:
            await model.generate(Request([Message("user", "Say yes.")], Sampling(TOKENS)))


async def _try_server(what: str, url: str) -> str | None:
    import aiohttp

    try:
        timeout = aiohttp.ClientTimeout(HEALTH_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url.rstrip('/')}/health"):
            return None
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return f"{what}: cannot reach {url} ({str(error) or type(error).__name__}); is the server running?"
