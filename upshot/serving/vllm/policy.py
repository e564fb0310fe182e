"""The policy sampled by vLLM: exact ids in and out, and never a reply from outdated weights.

The learner counts versions. A request first makes sure that the newest version is loaded: requests in progress finish,
the server's gate closes, every worker loads the weights and confirms it, and the gate opens for that version. Each
request names its version, and the gate refuses any other. So a restarted server, which does not have our weights yet,
answers nothing until it has them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError
from upshot.models.base import Abilities, Completion, ModelCallError, PolicySampler, Request
from upshot.models.endpoint import EndpointModel
from upshot.models.rendering import Renderer
from upshot.serving.vllm.launch import Address, ServerDown, VllmClient
from upshot.serving.vllm.weights import ROUTE_NAMES, Route, check_arrival, choose_route, folder_for, pack_weights

log = logging.getLogger(__name__)

HEADER = "X-Upshot-Version"
ATTEMPTS = 5
"""How often a request, or the transfer of a version, is tried if the server fails."""
POLL_S = 0.5
GONE = ("connection", "timeout", "http_409", "aborted")
"""Failures of a call, besides 5xx, after which the server is checked and the call is repeated."""


class VllmPolicy(PolicySampler):
    """The model in training behind a vLLM server of its run."""

    sync_seconds: float = 0.0

    def __init__(
        self, address: Address, module: Any, tokenizer: Any, renderer: Renderer, run: Path, say: Callable[[str], None]
    ) -> None:
        self.name = "policy"
        self.address, self.module, self.tokenizer, self.renderer = address, module, tokenizer, renderer
        self.run, self.say = run, say
        self.abilities = Abilities(ids_in=True, ids_out=True, seed=True, scores=True)
        self.end_ids = {*renderer.end_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
        self.adapters = any(not weight.requires_grad for weight in module.parameters())
        """Whether only adapters are trained: then they are swapped, and the base weights stay."""
        self.version = 0
        """The version of the learner's weights."""
        self.syncs = 0
        """How often weights were transferred."""
        self.client = VllmClient(address.url, address.key)
        self.endpoint = EndpointModel(address.spec)
        self._loaded: str | None = None
        """The version that the server last confirmed; None: unknown."""
        self._asking = 0
        self._idle = asyncio.Event()
        self._changing = asyncio.Lock()

    def weights_changed(self) -> None:
        """The learner has taken a step: sample everything from now on from the new weights."""
        self.version += 1

    async def start(self) -> None:
        """Connect to the server and transfer the weights."""
        await self.endpoint.start()
        await self._ensure_newest()

    async def aclose(self) -> None:
        """Close the connections; the server itself ends with the run."""
        await self.endpoint.aclose()
        await self.client.close()

    async def generate(self, request: Request) -> list[Completion]:
        """`request.n` completions, all from the weights that were the newest at the time of the call."""
        prompt: Any = request.prompt
        ids = prompt if request.by_ids else self.renderer.prompt_ids(prompt, request.tools)
        stops = tuple(sorted({*request.sampling.stop_ids, *self.end_ids}))
        by_ids = replace(request, prompt=ids, tools=(), sampling=replace(request.sampling, stop_ids=stops))
        for attempt in range(ATTEMPTS):
            version = await self._ensure_newest()
            self._asking += 1  # no await since the version was checked
            self._idle.clear()
            try:
                completions = await self.endpoint.generate(by_ids)
                return [self._read_completion(completion, version, request) for completion in completions]
            except ModelCallError as error:
                lost = error.reason in GONE or error.reason.startswith("http_5")
                if not lost or attempt == ATTEMPTS - 1:
                    raise
                log.warning("vLLM: %s; the request is repeated", error)
            finally:
                self._asking -= 1
                if not self._asking:
                    self._idle.set()
            await self._wait_for_server()
        raise AssertionError("the last attempt returns or raises")

    async def rest(self, park: bool) -> None:
        """Put vLLM to sleep while the learner works, if they share a GPU."""
        if self.address.same_gpu and self._loaded is not None:
            async with self._changing:
                await self._until_idle()
                self._loaded = None
                try:
                    await self.client.turn_gate(None)
                    await self.client.sleep(self.address.level)
                except ServerDown as error:  # it has ended and takes no memory; the next request waits for its restart
                    log.warning("vLLM: %s; it could not be put to sleep", error)

    async def disconnect(self) -> None:
        """Close the connections to the server: nothing is sampled for now."""
        await self.aclose()

    def _read_completion(self, completion: Completion, version: int, request: Request) -> Completion:
        """The completion with its version, and its text as our own tokenizer reads its ids."""
        if request.given:
            return replace(completion, version=version)
        if completion.finish == "abort":  # a server that goes to sleep or ends answers in this way
            raise ModelCallError("aborted", "vLLM aborted the request")
        if completion.ids is None or completion.logprobs is None:
            raise ModelCallError("bad_response", "vLLM returned no token ids or log-probabilities")
        text = completion.text
        if not request.sampling.stop:
            text = self.tokenizer.decode(list(completion.ids), skip_special_tokens=True)
        return replace(completion, text=text, version=version)

    async def _ensure_newest(self) -> int:
        """Make sure that the newest weights are loaded; returns their version."""
        failed = 0
        while self._loaded != str(self.version):
            try:
                async with self._changing:
                    if self._loaded != str(self.version):  # another request may have loaded them meanwhile
                        await self._until_idle()
                        await self._hand_over(str(self.version))
            except ServerDown as error:
                failed += 1
                if failed == ATTEMPTS:
                    raise UserError(
                        f"vLLM did not take the weights of version {self.version} ({error}); log: {self.address.log}"
                    ) from error
                log.warning("vLLM: %s; the weights are sent again", error)
                await self._wait_for_server()
        return self.version

    async def _until_idle(self) -> None:
        while self._asking:
            await self._idle.wait()

    async def _wait_for_server(self) -> None:
        """Wait until the server answers; if it was restarted, its weights count as unknown."""
        deadline = time.monotonic() + self.address.start_s
        while True:
            try:
                if (await self.client.look("/upshot/gate"))["version"] != self._loaded:
                    self._loaded = None
                return
            except ServerDown as error:
                self._loaded = None
                if self.address.same_gpu:
                    _release()  # it needs memory to start
                if time.monotonic() > deadline or not self.address.is_up():
                    raise UserError(
                        f"the policy's vLLM server did not come back ({error}); its log: {self.address.log}"
                    ) from error
            await asyncio.sleep(POLL_S)

    async def _hand_over(self, version: str) -> None:
        """Send the learner's weights to the server, and let requests for them in once every worker has them."""
        began = time.monotonic()
        self._loaded = None
        await self.client.turn_gate(None)
        asleep = self.address.same_gpu and (await self.client.look("/is_sleeping"))["is_sleeping"]
        if asleep:
            _release()
            await self.client.change("/wake_up?tags=weights")
        route = await (self._swap(version) if self.adapters else self._load(version))
        if asleep:
            await self.client.change("/wake_up?tags=kv_cache")
        await self.client.change("/reset_prefix_cache")
        await self.client.turn_gate(version)
        self.endpoint.headers = {HEADER: version}
        # Cached prefixes of other weights would never match, even if some were left.
        self.endpoint.spec = self.endpoint.spec.model_copy(update={"extra_body": {"cache_salt": f"version {version}"}})
        self._loaded = version
        self.syncs += 1
        took = time.monotonic() - began
        self.sync_seconds += took
        (self.say if self.syncs == 1 else log.info)(f"vLLM       weights by {route} in {took:.2f} s")

    async def _load(self, version: str) -> str:
        """Send all weights into the workers' own tensors."""
        weights = dict(self.module.named_parameters())
        route = choose_route(weights, self.address.same_gpu and self.address.workers == 1)
        with ExitStack() as kept:
            transfer = await asyncio.to_thread(kept.enter_context, pack_weights(weights, version, route, self.run))
            await self.client.ask_workers("upshot_load", transfer)
        check_arrival(await self.client.ask_workers("upshot_state"), version, weights)
        return ROUTE_NAMES[route]

    async def _swap(self, version: str) -> str:
        """Send only the adapters, under a separate name."""
        weights = {name: weight for name, weight in self.module.named_parameters() if weight.requires_grad}
        route: Route = choose_route(weights, same_gpu=False)
        name = f"policy-{version}"
        for other in (await self.client.look("/v1/models"))["data"]:
            if other.get("parent"):  # an adapter
                await self.client.change("/v1/unload_lora_adapter", {"lora_name": other["id"]})
        with folder_for(route, self.run) as folder:
            await asyncio.to_thread(self.module.save_pretrained, folder)
            await self.client.change("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        self.endpoint.served = name
        return f"a new adapter through {ROUTE_NAMES[route]}"


def _release() -> None:
    """Release the learner's unused GPU memory, so that vLLM can take it."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()
