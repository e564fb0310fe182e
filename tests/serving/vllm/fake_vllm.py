"""Stands in for a vLLM server: its routes and bodies as vLLM 0.32 answers them (`recorded.json`), in a thread.

`WeightsGate` and `WeightsWorker` are our real ones. The model is a transformers model, so what it samples, and with
which log-probabilities, depends on the weights it received. It can be slow, drop connections, or be killed.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from aiohttp import web

from tests.patience import patience
from upshot.serving.vllm.inside.upshot_gate import WeightsGate, answer
from upshot.serving.vllm.inside.upshot_hands import WeightsWorker

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
KEY = "key"


class Worker(WeightsWorker):
    """The class that our worker extension is mixed into."""

    def __init__(self, module: Any, world: int = 1) -> None:
        self.model_runner = SimpleNamespace(get_model=lambda: module)
        self.device, self.rank = torch.device("cpu"), 0
        self.parallel_config = SimpleNamespace(world_size=world)


class FakeVllm:
    """A server with its own event loop; `port` stays over restarts."""

    def __init__(
        self,
        module: Any,
        world: int = 1,
        loses: tuple[str, ...] = (),
        port: int = 0,
        name: str = "policy",
        tokenizer: Any = None,
        gated: bool = True,
    ) -> None:
        self.shape = copy.deepcopy(module)
        self.name, self.tokenizer, self.gated = name, tokenizer, gated
        self.world, self.loses = world, loses
        """The reported number of workers; names of weights that get lost in transfer."""
        self.latency_s = 0.0
        self.drops = 0
        """This many of the next samplings end without an answer."""
        self.gives_up = 0
        """This many of the next samplings are aborted, as vLLM does before it sleeps."""
        self.calls: list[str] = []
        """Every requested route, in order."""
        self.seen: list[dict[str, Any]] = []
        """Every body of a sampling that passed the gate."""
        self.most_busy_at_load = 0
        self.port = port
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Start, or restart, with meaningless weights and a closed gate."""
        self._wait(self._start())

    def kill(self) -> None:
        """Like kill -9: connections end, nothing is kept."""
        self._wait(self._kill())

    def close(self) -> None:
        self._wait(self._kill())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _wait(self, work: Awaitable[None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(patience(30))  # type: ignore[arg-type]

    async def _start(self) -> None:
        self.module = copy.deepcopy(self.shape).eval()
        with torch.no_grad():
            for weight in self.module.parameters() if self.gated else ():
                weight.uniform_(-1e-3, 1e-3)  # --load-format dummy
        self.module.load_weights = self._load_weights
        self.worker = Worker(self.module, self.world)
        self.adapters: dict[str, str] = {}
        self.asleep = False
        self.gate = WeightsGate(self.app)
        self.gate.key = KEY
        application = web.Application(client_max_size=2**30)
        application.router.add_route("*", "/{path:.*}", self._through_gate)
        self.runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.0)
        await self.runner.setup()
        self.site = web.TCPSite(self.runner, "127.0.0.1", self.port)
        await self.site.start()
        self.port = self.site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def _kill(self) -> None:
        if self.runner.server is None:
            return
        for handler in list(self.runner.server.connections):
            handler.force_close()
            if handler.transport is not None:
                handler.transport.abort()
        await self.runner.cleanup()

    def _load_weights(self, weights: Any) -> None:
        self.most_busy_at_load = max(self.most_busy_at_load, self.gate.busy)
        own = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, weight in weights:
                if name not in self.loses:
                    own[name].copy_(weight)

    async def _through_gate(self, request: web.Request) -> web.StreamResponse:
        """aiohttp → ASGI → aiohttp."""
        self.calls.append(request.path)
        body, sent = await request.read(), SimpleNamespace(status=500, body=b"")

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(event: dict[str, Any]) -> None:
            sent.status = event.get("status", sent.status)
            sent.body += event.get("body", b"")

        headers = [(name.lower(), value) for name, value in request.raw_headers]
        scope = {"type": "http", "path": request.path, "method": request.method, "headers": headers}
        through = self.gate if self.gated else self.app
        await through({**scope, "query_string": request.query_string.encode()}, receive, send)
        if sent.status == 0:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=sent.status or 500, body=sent.body, content_type="application/json")

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """vLLM's routes."""
        body = json.loads((await receive())["body"] or b"null")
        routes: dict[str, Callable[[Any], tuple[int, Any]]] = {
            "/health": lambda _: (200, None),
            "/v1/models": lambda _: (200, {"data": self._models()}),
            "/collective_rpc": self._rpc,
            "/reset_prefix_cache": lambda _: (200, RECORDED["reset_prefix_cache"]),
            "/v1/load_lora_adapter": self._hang_in,
            "/v1/unload_lora_adapter": self._take_out,
            "/is_sleeping": lambda _: (200, {"is_sleeping": self.asleep}),
            "/sleep": lambda _: self._sleep(True),
            "/wake_up": lambda _: self._sleep(False),
        }
        if scope["path"] == "/v1/chat/completions":
            await answer(send, 200, await asyncio.to_thread(self._chat, body))
            return
        if scope["path"] == "/v1/completions":
            self.seen.append(body | {"version": dict(scope["headers"]).get(b"x-upshot-version", b"").decode()})
            await asyncio.sleep(self.latency_s)
            if self.drops:
                self.drops -= 1
                await send({"type": "http.response.start", "status": 0})
                return
            status, found = await asyncio.to_thread(self._complete, body)
        else:
            status, found = routes[scope["path"]](body)
        await answer(send, status, found)

    def _models(self) -> list[dict[str, Any]]:
        one = RECORDED["models"]["data"]
        return [
            {**one[0], "id": self.name},
            *({**one[1], "id": name, "root": path} for name, path in self.adapters.items()),
        ]

    def _rpc(self, body: Any) -> tuple[int, Any]:
        try:
            return 200, {"results": [getattr(self.worker, body["method"])(*body["args"])]}
        except Exception as error:
            message = f"Call to collective_rpc method failed: Worker failed with error '{error}'"
            return 500, {"error": {"message": message, "type": "InternalServerError", "code": 500}}

    def _hang_in(self, body: Any) -> tuple[int, Any]:
        if body["lora_name"] in self.adapters:
            return 400, RECORDED["adapter_twice"]
        from peft import PeftModel

        base = copy.deepcopy(self.shape).eval()
        self.module = PeftModel.from_pretrained(base, body["lora_path"]).eval()
        self.adapters[body["lora_name"]] = body["lora_path"]
        return 200, f"Success: LoRA adapter '{body['lora_name']}' added successfully."

    def _take_out(self, body: Any) -> tuple[int, Any]:
        if self.adapters.pop(body["lora_name"], None) is None:
            return 404, RECORDED["no_adapter"]
        return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."

    def _sleep(self, asleep: bool) -> tuple[int, Any]:
        self.asleep = asleep
        return 200, {"status": "sleeping" if asleep else "awake"}

    @torch.no_grad()
    def _complete(self, body: Any) -> tuple[int, Any]:
        if body["model"] not in (self.name, *self.adapters):
            return 404, RECORDED["no_model"]
        prompt = body["prompt"]
        if body.get("echo"):
            found = torch.log_softmax(self.module(torch.tensor([prompt])).logits[0], -1)
            scores = [None, *(found[i, token].item() for i, token in enumerate(prompt[1:]))]
            return 200, self._answer(body, [([], scores, "length")])
        choices = [self._sampled(body, index) for index in range(body.get("n", 1))]
        if self.gives_up:
            self.gives_up -= 1
            choices = [([], [], "abort") for _ in choices]
        return 200, self._answer(body, choices)

    def _chat(self, body: Any) -> dict[str, Any]:
        asked = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        ids, _, finish = self._sampled({**body, "prompt": asked, "stop_token_ids": [self.tokenizer.eos_token_id]}, 0)
        message = {"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)}
        return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": {}}

    @torch.no_grad()
    def _sampled(self, body: Any, index: int) -> tuple[list[int], list[float], str]:
        random = torch.Generator().manual_seed(body.get("seed", 0) + index)
        ids, scores = list(body["prompt"]), []
        heat = body["temperature"]
        for _ in range(body["max_tokens"]):
            logits = self.module(torch.tensor([ids])).logits[0, -1] / (heat or 1)
            told = torch.log_softmax(logits, -1)
            token = int(torch.multinomial(told.exp(), 1, generator=random)) if heat else int(told.argmax())
            ids.append(token)
            scores.append(told[token].item())
            if token in body.get("stop_token_ids", ()):
                return ids[len(body["prompt"]) :], scores, "stop"
        return ids[len(body["prompt"]) :], scores, "length"

    def _answer(self, body: Any, choices: list[tuple[list[int], Any, str]]) -> dict[str, Any]:
        told = copy.deepcopy(RECORDED["completion"])
        usual = told["choices"][0]
        told["model"] = body["model"]
        told["choices"] = [
            {
                **usual,
                "index": i,
                "text": "",
                "token_ids": ids,
                "finish_reason": finish,
                "prompt_token_ids": body["prompt"],
            }
            | {"logprobs": {**usual["logprobs"], "token_logprobs": scores, "top_logprobs": []}}
            for i, (ids, scores, finish) in enumerate(choices)
        ]
        told["usage"] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": sum(len(c[0]) for c in choices)}
        return told
