"""Classmates finish the thought: a reply's chain of thought is worth what it makes other models answer.

M frozen classmates get (part of) the thought and sample R answers each; the task's verifier scores them. The main
reward is that of the reply itself. The kept thought is credited with main + classmate, all other tokens with main, or
everything with both.

`reward` says what the classmates' scores are taken as: `vanilla` as they are; `without-thought` by how much they are
above what the same classmate reaches without any thought, 0 where they are not; `steps` the gain at several cut points,
each credited to its own stretch of the thought; `other-question` and `similar-question` the thought is shown before
another row's question, the same for all replies to a row, and scored there.

The ideas have files of their own: options.py (what a recipe may say), thought_cut.py (what is handed on), panel.py
(asking and verifying), baselines.py (answers without the thought), similar.py (other questions), parts.py (scores →
parts of the reward), metrics.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Row, derive_seed
from upshot.core.errors import UserError, did_you_mean
from upshot.core.event_loop import gather
from upshot.core.score import Score
from upshot.rewards.build import build_metric
from upshot.rewards.credit import Credit, Reward, relabel
from upshot.rollout.dependencies import FutureDependencies
from upshot.rollout.episode import Policy
from upshot.rollout.futures.classmates.baselines import Baselines
from upshot.rollout.futures.classmates.classmate import Classmate, ClassmatePrompt
from upshot.rollout.futures.classmates.metrics import classmate_metrics
from upshot.rollout.futures.classmates.options import CLASSMATE, UNMASKED, ClassmatesOptions
from upshot.rollout.futures.classmates.panel import Panel
from upshot.rollout.futures.classmates.parts import classmate_parts, is_right
from upshot.rollout.futures.classmates.similar import OtherQuestions, before_another
from upshot.rollout.futures.classmates.thought_cut import CutPoint, cut_thought, mask_answer
from upshot.rollout.futures.talk import Futures, Talk, kinds
from upshot.rollout.reply import Future, Rollout


@kinds.register("classmates")
class Classmates(Futures):
    """M classmates x R samples, beside the reply's own reward."""

    def __init__(self, dependencies: FutureDependencies, options: ClassmatesOptions) -> None:
        known, task = dependencies, dependencies.task
        assert task is not None, "classmates answer the rows of a task"
        self.options = options
        self.main = Talk(
            known.metrics, known.weights, known.user, options.samples, options.rounds, known.credit, known.with_user
        )
        self.every_turn = self.main.every_turn
        self.renderer = known.renderer
        self.whole_reply = options.thought == "reply"
        sampling = Sampling(options.max_tokens, options.temperature)
        for name in (config.name for config in options.classmates if config.name not in known.models):
            raise UserError(
                f"futures.classmates names '{name}', which is not a model; {did_you_mean(name, known.models)}"
            )
        classmates = [Classmate(config, known.models[config.name], sampling) for config in options.classmates]
        metric = next((one for label, one in known.metrics.items() if options.metric in (label, one.path)), None)
        if metric is None:
            metric = build_metric(options.metric, {}, "futures.metric", **known.by_name())
        self.panel = Panel(classmates, task, metric, options.samples, options.likelihood_share)
        self.baselines = Baselines(self.panel, known.seed)
        similar_by = options.similar_by if options.reward == "similar-question" else ""
        self.others = OtherQuestions(task, known.seed, similar_by)

    async def start(self) -> None:
        """Find the classmates' tokenizers."""
        await self.panel.start()

    async def aclose(self) -> None:
        """Forget the baselines; the models are closed by whoever opened them."""
        self.baselines.close()

    async def play(self, reply: Rollout, policy: Policy) -> None:
        """The reply's own futures and the classmates' answers, all at once."""
        gate = self.options.gate
        if gate in ("no_classmate", "no_classmate_when_main_incorrect"):
            await self.main.play(reply, policy)
            if gate == "no_classmate" or not self._main_is_right(reply):  # a wrong answer costs no classmate's time
                return
            answers = await self._ask_classmates(reply)
        else:
            works: list[Coroutine[Any, Any, Any]] = [self.main.play(reply, policy), self._ask_classmates(reply)]
            _, answers = await gather(works)
        reply.futures = [*reply.futures, *answers]

    def _main_is_right(self, reply: Rollout) -> bool:
        return is_right(_verdict(self.main.score(reply)[0]), self.options.right_from)

    async def _ask_classmates(self, reply: Rollout) -> list[Future]:
        """Every classmate's answers to every cut of the thought."""
        cuts = self._cut(reply)
        if self.options.has_baselines and cuts:
            await self.baselines.ask(asked_row(reply.conversation))
            reply.baselines = self.baselines.known(asked_row(reply.conversation))
        masked = [self._mask(reply, cut) for cut in cuts] if self.options.mask != "none" else cuts
        answers = [self._ask(reply.conversation, one, cut) for cut in masked for one in self.panel.classmates]
        if self.options.mask == "both":
            answers += [
                self._ask(reply.conversation, one, cut, UNMASKED) for cut in cuts for one in self.panel.classmates
            ]
        return [future for futures in await asyncio.gather(*answers) for future in futures]

    def _cut(self, reply: Rollout) -> list[CutPoint]:
        """What is handed on; nothing of a policy whose ids cannot be read."""
        if self.renderer is None:
            return []
        return cut_thought(
            reply.conversation, self.options.keep, self.options.stretches, self.renderer.decode, self.whole_reply
        )

    def _mask(self, reply: Rollout, cut: CutPoint) -> CutPoint:
        """What is handed on without what gives the answer away."""
        answer = reply.conversation.turns[-1].message.content
        return replace(cut, text=mask_answer(cut.text, "" if self.whole_reply else answer))

    async def _ask(
        self, episode: Conversation, classmate: Classmate, cut: CutPoint, name: str = CLASSMATE
    ) -> list[Future]:
        """One classmate's answers to one cut, verified; the verdicts are called `name`."""
        asked = asked_row(episode)
        prompt = ClassmatePrompt(asked.messages, cut.text, self.options.mode)
        if self.options.asks_another_question:
            other = self.others.row(episode.row)
            messages = before_another(asked.messages, cut.text, other.messages)
            asked, prompt = other, ClassmatePrompt(messages, "", self.options.mode)
        seed = derive_seed(episode.seed, CLASSMATE, classmate.name, cut.number)
        kind = "" if name == CLASSMATE else f"/{name}"
        conversation = Conversation(asked, seed, f"{episode.key}/{classmate.name}/{cut.number}{kind}")
        shared = len(episode.turns) - 1 if asked.id == episode.row.id else 0
        futures = await self.panel.ask(classmate, prompt, conversation)
        for index, future in enumerate(futures):
            future.conversation.key += f"/{index}"
            future.shared, future.by, future.cut = shared, classmate.name, cut.number
            future.span = (cut.begin, cut.stop)
            future.scores = {name: future.scores[CLASSMATE]}
        return futures

    def worst(self, reply: Rollout, name: str, values: Sequence[float]) -> float:
        """The lowest, but of classmates' scores that are taken off the reward the highest."""
        if name not in (CLASSMATE, UNMASKED):
            return self.main.worst(reply, name, values)
        turned = self.options.gate == "neg_classmate_when_main_incorrect" and not self._main_is_right(reply)
        return max(values) if turned != (self.options.weight < 0) else min(values)

    async def rescore(self, reply: Rollout) -> None:
        """The main reward's futures, and the answers that classmates sampled."""
        await self.main.rescore(reply)
        played = [future for future in reply.futures if future.cut and future.missing is None]
        await self.panel.rescore([future for future in played if CLASSMATE in future.scores])

    def score(self, reply: Rollout) -> tuple[Reward, Credit]:
        """Main and classmate parts, and the tokens that earn them."""
        reward, credit = self.main.score(reply)
        cuts, known = self._cut(reply), reply.baselines
        parts = classmate_parts(reply.futures, [cut.number for cut in cuts], self.options, known, _verdict(reward))
        spans = credit.spans
        if self.options.tokens == "all":
            earned = tuple(name for name, part in parts.items() if not part.is_missing)  # what is not costs no token
            for at, sample in reply.conversation.places():
                spans = relabel(spans, at, at + len(sample.ids), earned)
        else:
            for cut in cuts:
                spans = relabel(spans, cut.start, cut.stop, (self.options.part_name(cut.number),))
        total = Credit({"main": reward.total, **parts}, ()).total(("main", *parts))
        return replace(reward, total=total), replace(credit, parts={**credit.parts, **parts}, spans=spans)

    def credit_for(self, reply: Rollout, reward: Reward) -> Credit:
        """A rule's reward is the main part; no classmate was asked."""
        return self.main.credit_for(reply, reward)

    def measure(self, replies: Sequence[Rollout]) -> dict[str, float]:
        """Classmates' scores, lengths of thoughts and answers, cut answers, agreement."""
        names = [classmate.name for classmate in self.panel.classmates]
        return classmate_metrics(replies, names, self.whole_reply)

    def state(self) -> dict[str, Any]:
        """The baselines that are known."""
        return {"baselines": self.baselines.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Ask no baseline again that was known."""
        self.baselines.restore(state.get("baselines", {}))


def asked_row(episode: Conversation) -> Row:
    """What the last reply answers: the row with everything that was said before it."""
    return replace(episode.row, messages=tuple(turn.message for turn in episode.turns[:-1]))


def _verdict(reward: Reward) -> Score:
    """Whether the main answer is right: the verifier's word, else the main reward."""
    return reward.means.get("verifier", reward.total)
