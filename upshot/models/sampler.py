"""Sampling in process, on the learner's own tensors: batched, KV-cached, one seed per request.

All requests that are ready run as one batch, on the event loop itself: what is batched together depends on the
conversations alone, so the same seed gives the same run, and `breakpoint()` works. Equal prompts (the replies of a
group, the futures of a reply) are prefilled once.

What this does not do: page its cache or admit requests into a running batch. That is the embedded engine's work.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from upshot.chat import Message, derive_seed
from upshot.models.base import Abilities, Completion, Model, Request, Sampling
from upshot.models.rendering import Renderer

SETTLED = 4
"""Turns of the event loop without a new request after which a batch is taken to be complete."""


@dataclass
class _Job:
    """One completion to sample."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    result: asyncio.Future[Completion]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""


class Sampler(Model):
    """A transformers causal LM as a model of the `models/` interface."""

    abilities = Abilities(ids_in=True, ids_out=True, seed=True)

    def __init__(self, module: Any, renderer: Renderer, name: str = "policy", max_batch: int = 1024) -> None:
        self.module = module
        self.renderer = renderer
        self.name = name
        self.max_batch = max_batch
        self.version = 0
        self._ends = renderer.end_ids
        self._queue: deque[_Job] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._entropy = np.random.default_rng()
        self._counts = {"calls": 0, "prompt_tokens": 0, "completion_tokens": 0, "batches": 0}

    def weights_changed(self) -> None:
        """Told by the learner after every optimizer step."""
        self.version += 1

    async def generate(self, request: Request) -> list[Completion]:
        """Queue the request's samples; they run in the next batch."""
        if request.by_ids:
            prompt = tuple(cast("Sequence[int]", request.prompt))
        else:
            prompt = tuple(self.renderer.prompt_ids(cast("Sequence[Message]", request.prompt), request.tools))
        seed = request.sampling.seed
        base = int(self._entropy.integers(2**62)) if seed is None else seed
        loop = asyncio.get_running_loop()
        jobs = [
            _Job(prompt, request.sampling, base if i == 0 else derive_seed(base, i), loop.create_future())
            for i in range(request.n)
        ]
        self._queue.extend(jobs)
        self._counts["calls"] += 1
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return list(await asyncio.gather(*(job.result for job in jobs)))

    async def aclose(self) -> None:
        """Drop what is still waiting."""
        if self._worker is not None:
            self._worker.cancel()
        while self._queue:
            self._queue.pop().result.cancel()

    def stats(self) -> dict[str, float]:
        """Calls, tokens and batches since the start."""
        return {name: float(value) for name, value in self._counts.items()}

    async def _work(self) -> None:
        while self._queue:
            await self._settle()
            batch = [self._queue.popleft() for _ in range(min(self.max_batch, len(self._queue)))]
            batch = [job for job in batch if not job.result.cancelled()]
            if not batch:
                continue
            try:
                self._run(batch)
            except Exception as error:
                for job in batch:
                    if not job.result.done():
                        job.result.set_exception(error)
                continue
            for job in batch:
                if not job.result.done():
                    job.result.set_result(self._completion(job))

    async def _settle(self) -> None:
        quiet = 0
        while quiet < SETTLED and len(self._queue) < self.max_batch:
            before = len(self._queue)
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._queue) == before else 0

    def _completion(self, job: _Job) -> Completion:
        ids = job.ids[:-1] if job.ids and job.ids[-1] in self._ends else job.ids
        text = _before_stop(self.renderer.decode(ids), job.sampling.stop)
        return Completion(
            text=text,
            finish=job.finish,
            ids=tuple(job.ids),
            logprobs=tuple(job.logprobs),
            prompt_tokens=len(job.prompt),
            completion_tokens=len(job.ids),
            version=self.version,
        )

    def _run(self, jobs: list[_Job]) -> None:
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                self._decode(jobs)
        finally:
            self.module.train(training)
        self._counts["batches"] += 1
        self._counts["prompt_tokens"] += sum(len(job.prompt) for job in jobs)
        self._counts["completion_tokens"] += sum(len(job.ids) for job in jobs)

    def _prefill(self, jobs: list[_Job]) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """Logits after each job's prompt, the KV cache and attention mask of the whole batch."""
        unique = {prompt: i for i, prompt in enumerate(dict.fromkeys(job.prompt for job in jobs))}
        width = max(map(len, unique))
        device = self.module.device
        ids = torch.zeros(len(unique), width, dtype=torch.long)
        mask = torch.zeros(len(unique), width, dtype=torch.long)
        for prompt, i in unique.items():  # padded on the left: all prompts end in the same column
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, width - len(prompt) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = self.module(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
        rows = torch.tensor([unique[job.prompt] for job in jobs], device=device)
        cache = out.past_key_values
        cache.batch_select_indices(rows)
        return out.logits[rows, -1], cache, mask[rows]

    def _decode(self, jobs: list[_Job]) -> None:
        logits, cache, mask = self._prefill(jobs)
        positions = mask.sum(1)
        noise = np.stack([_uniforms(job, max(j.sampling.max_tokens for j in jobs)) for job in jobs])
        alive = list(jobs)
        step = 0
        while True:
            tokens, logprobs = sample_tokens(logits, [job.sampling for job in alive], noise[:, step])
            keep: list[int] = []
            for i, (job, token, logprob) in enumerate(zip(alive, tokens.tolist(), logprobs.tolist(), strict=True)):
                job.ids.append(token)
                job.logprobs.append(logprob)
                job.finish = self._finished(job)
                if not job.finish:
                    keep.append(i)
            if not keep:
                return
            if len(keep) < len(alive):
                rows = torch.tensor(keep, device=logits.device)
                cache.batch_select_indices(rows)
                mask, positions, tokens = mask[rows], positions[rows], tokens[rows]
                noise = noise[keep]
                alive = [alive[i] for i in keep]
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
            out = self.module(
                input_ids=tokens[:, None],
                attention_mask=mask,
                position_ids=positions[:, None],
                past_key_values=cache,
                use_cache=True,
            )
            logits = out.logits[:, -1]
            positions = positions + 1
            step += 1

    def _finished(self, job: _Job) -> str:
        if job.ids[-1] in self._ends or job.ids[-1] in job.sampling.stop_ids:
            return "stop"
        if job.sampling.stop:
            text = self.renderer.decode(job.ids)
            if any(stop in text for stop in job.sampling.stop):
                return "stop"
        return "length" if len(job.ids) >= job.sampling.max_tokens else ""


def _uniforms(job: _Job, width: int) -> np.ndarray:
    """The request's own random numbers, one per token; neighbours in the batch do not matter."""
    return np.random.Generator(np.random.Philox(key=job.seed)).random(width)


def sample_tokens(
    logits: torch.Tensor, samplings: Sequence[Sampling], noise: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row and its log-probability under softmax(logits / temperature), before any cut."""
    logits = logits.float()
    device = logits.device
    temperature = torch.tensor([s.temperature or 1.0 for s in samplings], device=device)
    logprobs = torch.log_softmax(logits / temperature[:, None], dim=-1)
    kept = _cut(logprobs, samplings)
    cumulative = kept.exp().cumsum(-1)
    uniform = torch.as_tensor(noise, dtype=cumulative.dtype, device=device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, uniform, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)
    greedy = torch.tensor([s.temperature == 0 for s in samplings], device=device)
    tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def _cut(logprobs: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Log-probabilities with what top-k, top-p and min-p exclude at minus infinity."""
    if all(s.top_p >= 1 and s.top_k <= 0 and s.min_p <= 0 for s in samplings):
        return logprobs
    device, size = logprobs.device, logprobs.shape[-1]
    ordered, order = logprobs.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    top_p = torch.tensor([s.top_p for s in samplings], device=device)[:, None]
    top_k = torch.tensor([s.top_k if s.top_k > 0 else size for s in samplings], device=device)[:, None]
    min_p = torch.tensor([max(s.min_p, 1e-30) for s in samplings], device=device)[:, None]
    rank = torch.arange(size, device=device)[None, :]
    drop = (before >= top_p) | (rank >= top_k) | (ordered < ordered[:, :1] + min_p.log())
    drop[:, 0] = False
    ordered = ordered.masked_fill(drop, -torch.inf)
    return torch.empty_like(logprobs).scatter_(1, order, ordered)


def _before_stop(text: str, stops: Sequence[str]) -> str:
    cuts = [text.index(stop) for stop in stops if stop in text]
    return text[: min(cuts)] if cuts else text
