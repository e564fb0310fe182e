"""`upshot data build`: simulate conversations, try several replies per turn, score them by what they lead to.

The simulated user opens; N candidates answer (a share of them with the proactive prompt). Each is scored by its
multiturn-aware reward; the plain policy plays all futures, so that scores are comparable. The best candidate stays, and
the next user turn is the first one of its longest future. Each finished turn is a line of the journal: after kill -9 a
build continues after the last one, and retries the turns that failed.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Message, Row, Turn, derive_seed
from upshot.core.errors import UserError
from upshot.core.time_limit import CallTimeout, limit_call
from upshot.models.base import ModelCallError
from upshot.offline.arguments import POLICY, build_simulation, open_task, rows_of, task_metrics
from upshot.offline.data.published import published_rows, push, summarise, write_published
from upshot.offline.job import Job, Journal, run_all
from upshot.rewards.build import metric_configs
from upshot.rollout.episode import Policy
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import RolloutContext, open_by, score_reply
from upshot.rollout.reply import Future, Rollout
from upshot.rollout.services import Services
from upshot.run.console import print_rows
from upshot.tasks.collabllm import PLAIN, PROACTIVE, CollabTask
from upshot.tasks.participants.ask import Flaw, ask, text_schema
from upshot.tasks.participants.base import Observation, Participant
from upshot.tasks.participants.templates import as_lines, as_text, render
from upshot.tasks.users.llm import END_SIGNAL

JOURNAL = "journal.log"
FIRST = "first answer"
PROACTIVE_PLAN = text_schema("current_problem", "thought", "response")
WHO = ("task", "file", "split", "policy", "user", "judge", "tokenizer", "max_tokens", "temperature", "seed")
HOW = ("candidates", "proactive_share", "proactive", "system_share", "samples", "rounds")
Line = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Build, write all finished turns even if a budget ran out, and print the summary; 1 if every goal failed."""
    check_arguments(args)
    task = open_task(args.task, args.file)
    rows = rows_of(task, args.split)[: args.conversations]
    metrics = task_metrics(args.metrics, task)
    out = Path(args.out)
    if not args.quiet and not args.json:
        print(tell_size(args, len(rows), args.max_messages or task.max_messages, len(metrics)), file=sys.stderr)
    with Journal(out / JOURNAL, settings_of(args, task, metrics)) as journal:
        lines = journal.lines_of("conv", "turn", "ended")
        job = Job("turns", args, journal)
        try:
            stats = asyncio.run(_build(job, task, rows, metrics, lines))
        finally:
            weights = {metric.name: metric.weight for metric in metric_configs(metrics)}
            path = write_published(out, published_rows(rows, lines, weights), list(metrics))
    if args.push:
        push(path, args.push)
    summary = summarise(rows, lines)
    _print({**summary, "spent": job.budget.state(), "file": str(path)}, stats, args.json)
    return 1 if summary["failed"] and not summary["finished"] else 0


def tell_size(args: argparse.Namespace, conversations: int, messages: int, metrics: int) -> str:
    """The most calls and tokens that a build can take: a small local model may need hours for them."""
    turns = conversations * (messages // 2)
    replies = turns * args.candidates
    calls = replies + (spoken := replies * args.samples * args.rounds)
    return (
        f"at most {turns:,} turns x {args.candidates} candidates: {calls:,} replies of up to {args.max_tokens} tokens "
        f"({calls * args.max_tokens / 1e6:.3g} M tokens), {spoken + turns:,} user turns, "
        f"{replies * args.samples * metrics:,} scores; an estimate of the time follows the first turn"
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse impossible numbers before any work."""
    if args.candidates < 1:
        raise UserError(f"candidates is {args.candidates}; at least one reply must be tried")
    for name, share in (("proactive-share", args.proactive_share), ("system-share", args.system_share)):
        if not 0 <= share <= 1:
            raise UserError(f"{name} is {share}; it must be a share from 0 to 1")
    if args.max_messages is not None and args.max_messages < 2:
        raise UserError(f"max-messages is {args.max_messages}; it must be at least 2 (a question and a reply)")


def settings_of(args: argparse.Namespace, task: CollabTask, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that must not change when a build is resumed; limits, concurrency and the number of goals may."""
    longest = args.max_messages or task.max_messages
    templates = {"templates": args.templates} if args.templates != "full" else {}
    settings = {name: getattr(args, name) for name in (*WHO, *HOW)}
    return {**settings, "max_messages": longest, "metrics": dict(metrics), **templates}


async def _build(
    job: Job, task: CollabTask, rows: Sequence[Row], metrics: Mapping[str, Any], lines: list[Line]
) -> dict[str, float]:
    """Bring every row's conversation to its end, into the journal and `lines`; the counters of models and user."""
    args = job.args
    who = ({"policy": args.policy}, args.user, args.judge, metrics)
    async with build_simulation(task, *who, job.budget, args.tokenizer, args.templates == "short") as services:
        builder = Builder(services, args, args.max_messages or task.max_messages)
        started = {row.id: ConversationProgress(row, tuple(Turn(m) for m in row.messages)) for row in rows}
        for line in lines:
            if line["conv"] in started:
                started[line["conv"]].add(line)

        async def one(progress: ConversationProgress) -> None:
            while progress.ended is None:
                line = await builder.next_line(progress)
                lines.append(line)
                job.write(line, failure=line.get("failed"), whole=bool(line["ended"]))
                if line.get("failed"):  # not finished: the next run retries it
                    return
                progress.add(line)

        todo = [progress for progress in started.values() if progress.ended is None]
        await job.run(todo, one, len(rows) - len(todo), "conversations")
        return services.stats()


@dataclass
class ConversationProgress:
    """A conversation in progress: what was said, the user's session, and why it ended."""

    row: Row
    turns: tuple[Turn, ...] = ()
    session: dict[str, Any] = field(default_factory=dict)
    ended: str | None = None

    def add(self, line: Line) -> None:
        """Continue as a line of the journal says."""
        if line.get("failed"):
            return
        if line.get("best") is not None:
            self.turns = (*self.turns, Turn(Message("assistant", line["candidates"][line["best"]]["completion"])))
        user_turn = line.get("next")
        if user_turn is not None:
            self.turns = (*self.turns, Turn(Message("user", user_turn["content"]), note=user_turn.get("note") or {}))
        self.session = line.get("session") or {}
        self.ended = line["ended"]

    def conversation(self, seed: int) -> Conversation:
        """The conversation so far, as the opening of the next replies: its turns do not count towards their score."""
        row = replace(self.row, messages=tuple(turn.message for turn in self.turns))
        conversation = Conversation(row, derive_seed(seed, row.id, len(self.turns)), turns=self.turns)
        conversation.session = copy.deepcopy(self.session)
        return conversation


class FirstAnswer(Participant):
    """The simulated user; its first answer in each future is kept, so that the conversation can continue with it."""

    def __init__(self, user: Participant) -> None:
        self.user = user

    async def observe(self, conversation: Conversation) -> Observation:
        """The user's own answer."""
        observation = await limit_call(self.user, self.user.observe, conversation)
        if FIRST not in conversation.session:
            conversation.session[FIRST] = (observation, copy.deepcopy(conversation.session))
        return observation


class JsonProactive(Policy):
    """The proactive prompt in CollabLLM's own form: one request that shows the conversation and asks for JSON.

    The message is the answer's `response`; the rest of the answer is kept with the turn and shown to nobody.
    """

    async def reply(self, conversation: Conversation, role: str = "policy") -> Turn | None:
        """Ask for the JSON and say its `response`; `ModelCallError` if the model gives nothing usable."""
        seed = derive_seed(conversation.seed, "turn", len(conversation.turns))
        prompt = render(
            "proactive",
            conversation=as_lines(conversation.messages),
            additional_info=as_text(conversation.row.meta.get("additional_info")),
            max_new_tokens=self.sampling.max_tokens,
        )
        answer = await ask(self.model, prompt, PROACTIVE_PLAN, _plan_flaw, replace(self.sampling, seed=seed), role)
        values = answer.values
        note = {key: as_text(values.get(key)) for key in ("current_problem", "thought")}
        return conversation.say(Message("assistant", values["response"].strip()), note=note)


def _plan_flaw(values: Mapping[str, Any]) -> Flaw | None:
    response = values.get("response")
    if not isinstance(response, str) or not response.strip():
        return Flaw("missing_key", '"response" must be text')
    return None


class Builder:
    """Gives a conversation its next line: the opening, or a turn with all its candidates."""

    def __init__(self, services: Services, args: argparse.Namespace, max_messages: int) -> None:
        self.services, self.args, self.max_messages = services, args, max_messages
        (model,) = (model for name, model in services.models.items() if name.startswith(POLICY))
        sampling = Sampling(args.max_tokens, args.temperature)
        plain = Policy(model, sampling=sampling, system=PLAIN)
        proactive = Policy(model, sampling=sampling, system=PROACTIVE)
        if args.proactive == "json":
            proactive = JsonProactive(model, sampling=sampling)
        self.policies = {"proactive": proactive, "plain": plain, "bare": Policy(model, sampling=sampling)}
        user = FirstAnswer(services.user) if services.user is not None else None
        self.signal = str(getattr(services.user, "end_signal", END_SIGNAL))
        futures = Talk(services.metrics, services.weights, user, args.samples, args.rounds)
        self.context = RolloutContext(plain, futures)

    async def next_line(self, progress: ConversationProgress) -> Line:
        """The next event of a conversation, as a line of the journal."""
        if any(turn.message.role == "user" for turn in progress.turns):
            return await self._turn(progress)
        opening = await open_by(self.services.user, progress.conversation(self.args.seed))
        line: Line = {"conv": progress.row.id, "turn": 0, "ended": None}
        if opening.failure is not None:  # this conversation is over; the others continue
            return {**line, **_failure(f"opening: {opening.failure.reason}"), "why": opening.failure.why}
        user_turn = opening.turns[-1]
        line["next"] = {"content": user_turn.message.content, "note": dict(user_turn.note)}
        line["session"] = opening.session
        return line

    async def _turn(self, progress: ConversationProgress) -> Line:
        """Try all candidates, keep the best, and get the user's answer to it."""
        conversation = progress.conversation(self.args.seed)
        kinds = list(enumerate(kinds_of(self.args)))
        replies = await run_all(kinds, lambda kind: self._candidate(conversation, *kind), len(kinds))
        candidates = [_candidate_line(*tried, self.signal) for tried in replies]
        scored = [i for i, c in enumerate(candidates) if c["score"] is not None]
        length = sum(turn.message.role != "system" for turn in progress.turns)
        line: Line = {"conv": progress.row.id, "turn": length, "candidates": candidates, "ended": None}
        if not scored:
            reasons = Counter(candidate["missing"] for candidate in candidates)
            return {**line, "best": None, **_failure(f"no candidate has a score ({reasons.most_common(1)[0][0]})")}
        line["best"] = max(scored, key=lambda i: candidates[i]["score"])
        if length + 3 > self.max_messages:
            return {**line, "ended": "messages"}
        return {**line, **await self._answer(replies[line["best"]][0])}

    async def _candidate(self, conversation: Conversation, index: int, kind: str) -> tuple[Rollout, str, str | None]:
        """(reply, its prompt, why there is no reply)."""
        reply = Rollout(conversation.fork("candidate", index))
        try:
            await self.policies[kind].reply(reply.conversation)
        except UserError:
            raise
        except Exception as error:  # this candidate is missing, with the reason; its siblings are not
            return reply, kind, f"reply: {describe_failure(error)}"
        if not reply.conversation.turns[-1].message.content.strip():
            return reply, kind, "reply: empty"
        await score_reply(self.context, reply)
        return reply, kind, None

    async def _answer(self, best: Rollout) -> Line:
        """The user's answer to the best reply: the first turn of its longest future or, without one, a new answer."""
        played = [f for f in best.futures if f.missing is None and FIRST in f.conversation.session]
        if played:
            longest = max(played, key=lambda future: len(future.conversation.turns))
            observation, session = longest.conversation.session[FIRST]
        elif self.services.user is None:
            return {"ended": "no user"}
        else:
            fork = best.conversation.fork("user")
            try:
                observation = await limit_call(self.services.user, self.services.user.observe, fork)
            except UserError:
                raise
            except Exception as error:  # the conversation ends here, with the reason
                return _failure(f"user: {describe_failure(error)}")
            session = fork.session
        answer = "\n\n".join(message.content for message in observation.messages)
        if observation.done or not answer:
            return {"ended": observation.reason if observation.done else "user: said nothing"}
        return {"next": {"content": answer, "note": dict(observation.note)}, "session": session}


def kinds_of(args: argparse.Namespace) -> list[str]:
    """The prompt of each candidate of a turn."""
    proactive = round(args.candidates * args.proactive_share)
    plain = round((args.candidates - proactive) * args.system_share)
    return ["proactive"] * proactive + ["plain"] * plain + ["bare"] * (args.candidates - proactive - plain)


def _failure(reason: str) -> Line:
    """The end of a conversation for now: the next run retries its turn."""
    return {"ended": reason, "failed": reason}


def _candidate_line(reply: Rollout, kind: str, failed: str | None, signal: str) -> Line:
    """A candidate for the journal."""
    total = reply.reward.total
    if failed is not None:
        return {"completion": None, "prompt": kind, "score": None, "missing": failed, "sessions": [], "rewards": {}}
    start = len(reply.conversation.turns)
    return {
        "completion": reply.conversation.turns[-1].message.content,
        "prompt": kind,
        "score": total.value,
        "missing": total.reason if total.value is None else None,
        "sessions": [_session(future, start, signal) for future in reply.futures],
        "rewards": {n: [f.scores[n].value for f in reply.futures if n in f.scores] for n in reply.reward.terms},
    }


def _session(future: Future, start: int, signal: str) -> list[dict[str, str]]:
    """The turns after the reply; the user's leaving is written as the end signal, as in the published sets."""
    messages = [{"role": t.message.role, "content": t.message.content} for t in future.conversation.turns[start:]]
    if future.conversation.ended != "user":
        return messages
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": signal}]
    return [*messages[:-1], {"role": "user", "content": f"{messages[-1]['content']} {signal}"}]


def _print(summary: dict[str, Any], stats: dict[str, float], as_json: bool) -> None:
    if as_json:
        print(json.dumps({**summary, "stats": stats}, ensure_ascii=False))
        return
    rows = []
    for key, value in summary.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v:g}" for k, v in value.items()) or "none"
        rows.append((key.replace("_", " "), f"{value:.3f}" if isinstance(value, float) else str(value)))
    print_rows(("", ""), rows, "data built")


def describe_failure(error: Exception) -> str:
    """A short text for an exception."""
    if isinstance(error, ModelCallError | CallTimeout):
        return error.reason
    text = str(error).splitlines()[0][:120] if str(error) else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
