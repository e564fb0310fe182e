"""Whether the policy can be sampled by vLLM as the recipe wants it; nothing is started."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from upshot.core.errors import UserError
from upshot.run.checks.context import CheckContext, Finding
from upshot.run.policy_server import needs_server, server_of
from upshot.serving.servers.file import ServersConfig
from upshot.serving.servers.plan import check_program, place_servers, visible_gpus
from upshot.serving.vllm.launch import NAME


def check(context: CheckContext) -> Iterator[Finding]:
    """Look at the program, the devices and what vLLM cannot do."""
    recipe = context.recipe
    if not needs_server(recipe):
        return
    where = "model.engine"
    if context.ranks > 1:
        yield Finding(f"{where}: vllm samples for one process, but {context.ranks} train; set engine: upshot")
    if recipe.train.async_steps:
        yield Finding("train.async_steps: a vLLM server holds one version of the weights; set it to 0")
    episode = recipe.episode
    if episode.temperature not in (0, 1) and (episode.top_p < 1 or episode.top_k):
        yield Finding(
            f"episode.temperature {episode.temperature:g} with top_p or top_k: vLLM reports log-probabilities after "
            "the cut, or before the temperature; set temperature: 1, or leave the cuts out"
        )
    try:
        config = ServersConfig(servers={NAME: server_of(recipe, recipe.model.path or "tiny")})
        check_program(config)
        place_servers(config.servers, visible_gpus())
    except ValidationError as error:
        yield Finding(f"{where}: {error.errors()[0]['msg'].removeprefix('Value error, ')}")
    except UserError as error:
        yield Finding(str(error).replace(f"servers.{NAME}", where))
