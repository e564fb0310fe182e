"""Classmates finish the thought: a reply's chain of thought is worth what it makes other models answer.

M frozen classmates get (part of) the thought and sample R answers each; the task's verifier scores them. The main
reward is that of the reply itself. The kept thought is credited with main + classmate, all other tokens with main, or
everything with both.

`reward` says what the classmates' scores are taken as: `vanilla` as they are; `without-thought` minus what the same
classmate reaches without any thought; `steps` the gain at several cut points, each credited to its own stretch of the
thought; `other-question` and `similar-question` the thought is shown before another row's question and scored there.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Message, Row, Sample, derive_seed
from upshot.core.errors import UserError, did_you_mean
from upshot.core.score import Score, mean_score
from upshot.core.stopwatch import at_work
from upshot.models.base import Model
from upshot.models.rendering import Renderer
from upshot.rewards.build import build_metric
from upshot.rewards.classmate import agreement, gains, gated, no_thought, scaled, weighted_mean
from upshot.rewards.credit import Credit, relabel
from upshot.rewards.metric import Metric, score_by
from upshot.rewards.reward import MetricWeight, Reward
from upshot.rewards.workers.base import Manager
from upshot.rollout.futures.base import CreditRule, Futures, kinds
from upshot.rollout.futures.classmates.classmate import (
    Classmate,
    ClassmateAnswer,
    ClassmateConfig,
    ClassmatePrompt,
    before_another,
)
from upshot.rollout.futures.classmates.similar import OtherQuestions
from upshot.rollout.futures.classmates.thought_cut import ThoughtCut
from upshot.rollout.futures.talk import Talk
from upshot.rollout.policy import Policy
from upshot.rollout.rollout import Future, Rollout
from upshot.tasks.base import Task
from upshot.tasks.participants.base import Participant

CLASSMATE = "classmate"
ALL = ThoughtCut()
Kind = Literal["vanilla", "without-thought", "steps", "other-question", "similar-question"]
Gate = Literal["always", "no_classmate", "no_classmate_when_main_incorrect", "neg_classmate_when_main_incorrect"]


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A thought up to a point: token positions in the episode's ids, and the text that is handed on."""

    number: int
    begin: int
    """Where what is handed on begins."""
    start: int
    """Where the stretch begins that this cut adds to the one before."""
    stop: int
    text: str


@kinds.register("classmates")
class Classmates(Futures):
    """M classmates x R samples, beside the reply's own reward."""

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        weights: Mapping[str, MetricWeight],
        classmates: list[ClassmateConfig],
        models: Mapping[str, Model],
        task: Task,
        manager: Manager | None = None,
        judge: Model | None = None,
        sandbox: Any = None,
        renderer: Renderer | None = None,
        credit: CreditRule | None = None,
        user: Participant | None = None,
        seed: int = 0,
        samples: int = 1,
        rounds: int = 0,
        keep: ThoughtCut = ALL,
        mode: Literal["answer", "continue"] = "answer",
        reward: Kind = "vanilla",
        measure: Literal["sampled", "likelihood", "mixed"] = "sampled",
        mix: float = 0.5,
        cuts: int = 4,
        weight: float = 1.0,
        gate: Gate = "always",
        right_from: float = 1.0,
        tokens: Literal["kept", "all"] = "kept",
        similar_by: Literal["words", "key"] = "words",
        metric: str = "verifier",
        max_tokens: int = 512,
        temperature: float = 1.0,
    ) -> None:
        """Make the futures.

        classmates: names among the recipe's models, each alone or with weight, think, tokenizer, system.
        samples: answers of each classmate to each thought. rounds: rounds of talk for the main reward (0: none).
        keep: how much of the thought is handed on: a share, [low, high] drawn by reply, first-K-tokens, last-K-tokens.
        mode: answer at once, or continue the thought first. reward: see the top of this file; cuts: of `steps`.
        measure: sampled answers, the likelihood of the reference answer, or both with `mix` as the likelihood's share.
        weight: of the classmate part. gate: by whether the main verdict reaches `right_from`.
        tokens: kept: the thought that was handed on earns the part; all: every token does.
        similar_by: how a similar question is found: by its words (tf-idf), or by the task's own key.
        metric: what scores a classmate's answer. max_tokens, temperature: of the classmates.
        """
        self.main = Talk(metrics, weights, user, samples, rounds, credit)
        self.every_turn = self.main.every_turn
        self.classmates = [_found(config, models, Sampling(max_tokens, temperature)) for config in classmates]
        if not self.classmates:
            raise UserError("futures.classmates is empty; name at least one of the recipe's models")
        self.task = task
        self.renderer = renderer
        self.seed = seed
        self.samples = samples
        self.keep = ThoughtCut.parse(keep, "futures.keep")
        self.mode = mode
        self.kind = reward
        self.share = {"sampled": 0.0, "likelihood": 1.0, "mixed": mix}[measure]
        self.cuts = cuts if reward == "steps" else 1
        self.weight = weight
        self.gate = gate
        self.right_from = right_from
        self.tokens = tokens
        self.others = OtherQuestions(task, similar_by if reward == "similar-question" else "", seed)
        given = {"task": task, "manager": manager, "judge": judge, "models": models, "sandbox": sandbox}
        self.metric = build_metric(metric, {}, "futures.metric", **given)
        self._without: dict[tuple[str, str], asyncio.Task[list[Score]]] = {}

    async def start(self) -> None:
        """Find the classmates' tokenizers."""
        for classmate in self.classmates:
            await classmate.start()

    async def aclose(self) -> None:
        """Forget the baselines; the models are closed by whoever opened them."""
        for task in self._without.values():
            task.cancel()
        self._without.clear()

    async def play(self, reply: Rollout, policy: Policy) -> None:
        """The reply's own futures and the classmates' answers, all at once."""
        if self.gate == "no_classmate":
            await self.main.play(reply, policy)
            return
        if self.gate == "no_classmate_when_main_incorrect":  # a wrong answer costs no classmate's time
            await self.main.play(reply, policy)
            own = list(reply.futures)
            if _right(self._verdict(self.main.settle(reply)[0]), self.right_from):
                reply.futures = own + await self._continue(reply)
            return
        async with asyncio.TaskGroup() as tasks:
            main = tasks.create_task(self.main.play(reply, policy))
            continued = tasks.create_task(self._continue(reply))
        main.result()
        reply.futures = [*reply.futures, *continued.result()]

    async def _continue(self, reply: Rollout) -> list[Future]:
        """Every classmate's answers to every cut of the thought."""
        cuts = self._cut(reply)
        work: list[Coroutine[Any, Any, list[Future]]] = [
            self._answers(reply, classmate, cut) for cut in cuts for classmate in self.classmates
        ]
        if self.kind in ("without-thought", "steps") and cuts:
            await asyncio.gather(*(self._baseline(reply.conversation, classmate) for classmate in self.classmates))
        return [future for futures in await asyncio.gather(*work) for future in futures]

    def _cut(self, reply: Rollout) -> list[CutPoint]:
        """What is handed on of the last turn's thought; nothing where there is none."""
        place = _last(reply.conversation)
        if place is None or place[1].thought is None or self.renderer is None:
            return []
        at, sample = place
        start, stop = sample.thought or (0, 0)
        kept = self.keep.span(start, stop, random.Random(derive_seed(reply.conversation.seed, "keep")))
        edges = [kept[0] + (kept[1] - kept[0]) * number // self.cuts for number in range(self.cuts + 1)]
        cuts = []
        for number, (low, high) in enumerate(pairwise(edges), 1):
            # A cut may fall inside a character: the half that is no text yet is not handed over.
            text = self.renderer.decode(sample.ids[kept[0] : high]).strip("\ufffd").strip()
            if high > low and text:
                cuts.append(CutPoint(number, at + kept[0], at + low, at + high, text))
        return cuts

    async def _answers(self, reply: Rollout, classmate: Classmate, cut: CutPoint) -> list[Future]:
        """One classmate's answers to one cut, verified."""
        talk = reply.conversation
        asked = replace(talk.row, messages=tuple(turn.message for turn in talk.turns[:-1]))
        handed = ClassmatePrompt(asked.messages, cut.text, self.mode)
        if self.kind in ("other-question", "similar-question"):
            other = self.others.row(talk)
            handed = ClassmatePrompt(before_another(asked.messages, cut.text, other.messages), "", self.mode)
            asked = other
        seed = derive_seed(talk.seed, CLASSMATE, classmate.name, cut.number)
        conversation = Conversation(asked, seed, f"{talk.key}/{classmate.name}/{cut.number}")
        first = len(talk.turns) - 1 if asked.id == talk.row.id else 0
        answered = await self._ask(classmate, handed, conversation)
        for index, future in enumerate(answered):
            future.conversation.key += f"/{index}"
            future.shared, future.by, future.cut = first, classmate.name, cut.number
            future.span = (cut.begin, cut.stop)
        return answered

    async def _ask(self, classmate: Classmate, handed: ClassmatePrompt, conversation: Conversation) -> list[Future]:
        """Answers of one classmate as futures of one conversation, scored; a call that fails makes them missing."""
        row = conversation.row
        jobs: list[Any] = []
        if self.share < 1:
            jobs.append(classmate.answer(handed, self.samples, conversation.seed))
        if self.share > 0:
            jobs.append(classmate.likelihood(handed, self.task.answer_text(row)))
        try:
            with at_work("futures"):
                results = await asyncio.gather(*jobs)
        except UserError:
            raise
        except Exception as error:
            failed = Score.failed(error, classmate.name)
            count = self.samples if self.share < 1 else 1
            forks = [_fork(conversation, index) for index in range(count)]
            return [Future(fork, missing=failed.reason, scores={CLASSMATE: failed}) for fork in forks]
        said: list[ClassmateAnswer | None] = results[0] if self.share < 1 else [None]
        likely = results[-1] if self.share > 0 else 0.0
        return list(
            await asyncio.gather(*(self._score(_fork(conversation, i), one, likely) for i, one in enumerate(said)))
        )

    async def _score(self, conversation: Conversation, said: ClassmateAnswer | None, likely: float) -> Future:
        """One answer and its verdict, mixed with the likelihood of the reference where that is asked for."""
        if said is None:
            return Future(conversation, scores={CLASSMATE: Score(likely)})
        note = {"finish": said.finish, "tokens": said.tokens} | ({"thought": said.thought} if said.thought else {})
        conversation.say(Message("assistant", said.text), note=note)
        return Future(conversation, scores={CLASSMATE: await self._verdict_on(conversation, likely)})

    async def _verdict_on(self, conversation: Conversation, likely: float) -> Score:
        verdict = await score_by(self.metric, conversation, CLASSMATE)
        if self.share and verdict.value is not None:
            detail = {**verdict.detail, "sampled": verdict.value, "likelihood": likely}
            verdict = Score((1 - self.share) * verdict.value + self.share * likely, detail=detail)
        return verdict

    async def rescore(self, reply: Rollout) -> None:
        """The main reward's futures, and the answers that classmates sampled."""
        await self.main.rescore(reply)
        answered = [future for future in reply.futures if future.cut and future.missing is None and self.share < 1]

        async def one(future: Future) -> None:
            likely = float(future.scores[CLASSMATE].detail.get("likelihood", 0.0))
            future.scores = {CLASSMATE: await self._verdict_on(future.conversation, likely)}

        await asyncio.gather(*map(one, answered))

    async def _baseline(self, talk: Conversation, classmate: Classmate) -> list[Score]:
        """What a classmate reaches on a row without any thought: asked once for each row."""
        key = (classmate.name, talk.row.id)
        if key not in self._without:
            self._without[key] = asyncio.ensure_future(self._alone(talk.row, classmate))
        task = self._without[key]
        try:
            return await asyncio.shield(task)
        finally:
            failed = task.done() and (task.cancelled() or task.exception() or any(s.is_missing for s in task.result()))
            if failed and self._without.get(key) is task:
                del self._without[key]  # what failed is asked again; what is known stays

    async def _alone(self, row: Row, classmate: Classmate) -> list[Score]:
        seed = derive_seed(self.seed, "without", classmate.name, row.id)
        handed = ClassmatePrompt(row.messages, "", "answer")
        futures = await self._ask(classmate, handed, Conversation(row, seed, f"{row.id}/{classmate.name}/without"))
        return [future.scores[CLASSMATE] for future in futures]

    def _known(self, reply: Rollout) -> dict[str, list[Score]]:
        """The baselines of the reply's row, as far as they are known."""
        tasks = {c.name: self._without.get((c.name, reply.conversation.row.id)) for c in self.classmates}
        return {name: task.result() for name, task in tasks.items() if task is not None and task.done()}

    def settle(self, reply: Rollout) -> tuple[Reward, Credit]:
        """Main and classmate parts, and the tokens that earn them."""
        reward, credit = self.main.settle(reply)
        parts = self._parts(reply, reward)
        spans = credit.spans
        if self.tokens == "all":
            for at, sample in reply.conversation.places():
                spans = relabel(spans, at, at + len(sample.ids), tuple(parts))
        else:
            for cut in self._cut(reply):
                spans = relabel(spans, cut.start, cut.stop, (self._name(cut.number),))
        total = Credit({"main": reward.total, **parts}, ()).total(("main", *parts))
        return replace(reward, total=total), replace(credit, parts={**credit.parts, **parts}, spans=spans)

    def _parts(self, reply: Rollout, reward: Reward) -> dict[str, Score]:
        """The classmate part of the reward; with `steps` one for every cut."""
        weights = {classmate.name: classmate.config.weight for classmate in self.classmates}
        cuts = defaultdict(lambda: defaultdict(list))  # type: ignore[var-annotated]
        for future in reply.futures:
            if future.cut:
                cuts[future.cut][future.by].append(future.scores[CLASSMATE])
        out: dict[str, Score] = {}
        before = self._known(reply)
        for number in range(1, self.cuts + 1):
            reached: dict[str, list[Score]] = dict(cuts[number])
            change = gains(reached, before) if self.kind in ("without-thought", "steps") else reached
            part = weighted_mean(change, weights) if reached else no_thought()
            detail = {name: mean_score(scores).to_dict() for name, scores in reached.items()}
            part = replace(part, detail={**part.detail, "classmates": detail})
            part = gated(part, self.gate, self._verdict(reward), self.right_from)
            out[self._name(number)] = scaled(part, self.weight)
            before = reached if self.kind == "steps" and reached else before
        return out

    def _name(self, number: int) -> str:
        return f"{CLASSMATE} {number}" if self.kind == "steps" else CLASSMATE

    def _verdict(self, reward: Reward) -> Score:
        """Whether the main answer is right: the verifier's word, else the main reward."""
        return reward.means.get("verifier", reward.total)

    def decided(self, reply: Rollout, reward: Reward) -> Credit:
        """A rule's reward is the main part; no classmate was asked."""
        return self.main.decided(reply, reward)

    def measure(self, replies: Sequence[Rollout]) -> dict[str, float]:
        """Classmates' scores, lengths of thoughts and answers, cut answers, agreement."""
        return measure(replies, [classmate.name for classmate in self.classmates])

    async def learned(self, step: int) -> None:
        """Baselines of a classmate that follows the policy are asked again."""
        for classmate in self.classmates:
            if await classmate.model.follow(step):
                for key in [key for key in self._without if key[0] == classmate.name]:
                    del self._without[key]


def measure(replies: Sequence[Rollout], names: Sequence[str]) -> dict[str, float]:
    """The numbers of a step, under classmate/."""
    out: dict[str, float] = {}

    def put(name: str, values: Sequence[float]) -> None:
        if values:
            out[f"{CLASSMATE}/{name}"] = sum(values) / len(values)

    futures = [future for reply in replies for future in reply.futures if future.cut]
    for name in names:
        own = [future.scores[CLASSMATE] for future in futures if future.by == name]
        put(f"{name}/score", [score.value for score in own if score.value is not None])
        out[f"{CLASSMATE}/{name}/missing"] = float(sum(score.is_missing for score in own))
    put("score", [f.scores[CLASSMATE].value or 0.0 for f in futures if not f.scores[CLASSMATE].is_missing])
    said = [turn.note for future in futures for turn in future.conversation.turns[-1:] if "finish" in turn.note]
    put("answer_tokens", [float(note["tokens"]) for note in said])
    put("cut", [float(note["finish"] == "length") for note in said])
    places = [place for reply in replies if (place := _last(reply.conversation)) is not None]
    lengths = [(s.thought[1] - s.thought[0] if s.thought else 0, len(s.ids) - s.answer) for _, s in places]
    put("thought_length", [float(thought) for thought, _ in lengths])
    put("reply_length", [float(answer) for _, answer in lengths])
    put("no_thought", [float(thought == 0) for thought, _ in lengths])
    agreed = []
    for reply in replies:
        by: dict[str, list[Score]] = defaultdict(list)
        for future in reply.futures:
            if future.cut:
                by[future.by].append(future.scores[CLASSMATE])
        agreed.append(agreement(by))
    put("agreement", [share for share in agreed if share is not None])
    return out


def _found(config: ClassmateConfig, models: Mapping[str, Model], sampling: Sampling) -> Classmate:
    if config.name not in models:
        raise UserError(
            f"futures.classmates names '{config.name}', which is no model; {did_you_mean(config.name, models)}"
        )
    return Classmate(config, models[config.name], sampling)


def _last(conversation: Conversation) -> tuple[int, Sample] | None:
    return next(iter(reversed(list(conversation.places()))), None)


def _right(verdict: Score, right_from: float) -> bool:
    return verdict.value is not None and verdict.value >= right_from - 1e-9


def _fork(conversation: Conversation, index: int) -> Conversation:
    return Conversation(conversation.row, derive_seed(conversation.seed, index), conversation.key, conversation.turns)
