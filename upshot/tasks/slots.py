"""The quickstart's task: a shop assistant, and a customer who does not say everything at once.

The customer has a hidden goal (size, colour, thing) and opens with all, some or none of it. The assistant may answer at
once ("here is a small red lamp") or ask ("which size and colour ?"). The customer answers questions about the goal, now
and then vaguely. The answer is right only if it fits the whole goal. Guessing is short and mostly wrong; asking pays
only to someone who looks at what comes next.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from upshot.config.bounds import Made, Often, Share, Whole
from upshot.core.conversation import Conversation, Message, Row, derive_seed
from upshot.core.score import Score
from upshot.tasks.base import Task, last_reply, tasks
from upshot.tasks.participants.base import Observation, Participant

SLOTS: dict[str, tuple[str, ...]] = {
    "size": ("tiny", "small", "medium", "large", "huge", "narrow", "wide", "tall"),
    "colour": ("red", "blue", "green", "black", "white", "yellow", "brown", "pink", "grey", "purple"),
    "thing": ("lamp", "chair", "table", "bowl", "coat", "hat", "bag", "rug", "vase", "clock", "mirror", "shelf"),
}
VAGUE = ("hard to say", "what do you think", "not sure yet")
GREETINGS = ("", "hi", "hello", "good morning")
WORDS = set(" ".join([*GREETINGS, *VAGUE, "i want need would like a something please here is which and ?"]).split())


def say_goal(values: Mapping[str, str]) -> str:
    """Slot values in the order the language puts them: size, colour, thing."""
    return " ".join(values[slot] for slot in SLOTS if slot in values)


def answer(values: Mapping[str, str]) -> str:
    """The assistant's final answer."""
    return f"here is a {say_goal(values)}"


def question(slots: Sequence[str]) -> str:
    """The assistant's question for some slots."""
    return f"which {' and '.join(slots)} ?"


def asked_slots(text: str) -> list[str]:
    """The slots a reply asks for; empty if it does not ask."""
    words = text.split()
    return [slot for slot in SLOTS if slot in words] if words[:1] == ["which"] else []


@dataclass(eq=False)
class Customer(Participant):
    """Answers questions from the goal, vaguely with some probability, and leaves once an answer was given."""

    vague: float = 0.15

    async def observe(self, conversation: Conversation) -> Observation:
        """The customer's next words; done when the assistant has answered or said nothing of use."""
        last = conversation.turns[-1].message.content
        asked = asked_slots(last)
        if not asked:
            return Observation(done=True, reason="answered" if last.startswith("here is") else "left")
        if conversation.rng.random() < self.vague:
            text = conversation.rng.choice(VAGUE)
            return Observation((Message("user", text),), note={"vague": True})
        goal: Mapping[str, str] = conversation.row.goal
        return Observation((Message("user", say_goal({slot: goal[slot] for slot in asked})),))


@tasks.register("slots")
class SlotsTask(Task):
    """Rows are openings; some are conversations in progress, in which the user has just answered a question."""

    def __init__(
        self,
        rows_per_split: Made = 4000,
        ambiguous: Share = 0.7,
        midway: Share = 0.4,
        guessing: Share = 0.8,
        vague: Often = 0.15,
        seed: Whole = 0,
    ) -> None:
        self.size = rows_per_split
        self.ambiguous = ambiguous
        """Share of openings that leave something out."""
        self.midway = midway
        """Share of training rows that start after a question was answered."""
        self.guessing = guessing
        """Share of ambiguous demonstrations in which the assistant guesses instead of asking."""
        self.vague, self.seed = vague, seed

    @cached_property
    def _goals(self) -> dict[str, list[dict[str, str]]]:
        """All goals, split for good: training never sees a held-out one."""
        goals = [dict(zip(SLOTS, values, strict=True)) for values in product(*SLOTS.values())]
        random.Random(1).shuffle(goals)
        cut = len(goals) // 5
        return {"test": goals[:cut], "validation": goals[cut : 2 * cut], "train": goals[2 * cut :]}

    def user(self) -> Participant:
        """The customer."""
        return Customer(self.vague)

    def vocabulary(self) -> list[str]:
        """Every word of the little language."""
        return sorted({*WORDS, *SLOTS, *(value for values in SLOTS.values() for value in values)})

    def rows(self, split: str) -> list[Row]:
        """Openings of a split's goals; training rows include half-way conversations."""
        self.check_split(split)
        rows = []
        for number in range(self.size):
            rng = random.Random(derive_seed(self.seed, split, number))
            goal = rng.choice(self._goals[split])
            stated = self._draw_slots(rng)
            messages = [Message("user", _opening(goal, stated, rng))]
            if split == "train" and len(stated) < len(SLOTS) and rng.random() < self.midway:
                missing = [slot for slot in SLOTS if slot not in stated]
                vague = rng.random() < 0.4
                reply = rng.choice(VAGUE) if vague else say_goal({slot: goal[slot] for slot in missing})
                messages += [Message("assistant", question(missing)), Message("user", reply)]
            kind = "unambiguous" if len(stated) == len(SLOTS) else "ambiguous"
            rows.append(Row(f"slots/{split}/{number}", tuple(messages), goal, answer(goal), "slots", {"opening": kind}))
        return rows

    def dialogues(self, split: str) -> list[tuple[Message, ...]]:
        """Demonstrations that mostly guess what was left out, and answer well what was said."""
        return [self._dialogue(random.Random(derive_seed(self.seed, "demo", split, n))) for n in range(self.size)]

    async def verify(self, conversation: Conversation) -> Score:
        """1 if the last thing the assistant said is the answer that fits the whole goal, else 0."""
        return Score(float(" ".join(last_reply(conversation).split()) == conversation.row.reference))

    def groups(self, row: Row) -> Mapping[str, str]:
        """Ambiguous or unambiguous opening."""
        return {"opening": str(row.meta["opening"])}

    def _draw_slots(self, rng: random.Random) -> list[str]:
        if rng.random() >= self.ambiguous:
            return list(SLOTS)
        return rng.sample(list(SLOTS), rng.randrange(len(SLOTS)))

    def _dialogue(self, rng: random.Random) -> tuple[Message, ...]:
        goal = rng.choice(self._goals["train"])
        stated = self._draw_slots(rng)
        missing = [slot for slot in SLOTS if slot not in stated]
        talk = [Message("user", _opening(goal, stated, rng))]
        if missing and rng.random() >= self.guessing:
            talk.append(Message("assistant", question(missing)))
            while rng.random() < self.vague:
                talk += [Message("user", rng.choice(VAGUE)), Message("assistant", question(missing))]
            talk.append(Message("user", say_goal({slot: goal[slot] for slot in missing})))
            missing = []
        values = {slot: rng.choice(SLOTS[slot]) if slot in missing else goal[slot] for slot in SLOTS}
        return (*talk, Message("assistant", answer(values)))


def _opening(goal: Mapping[str, str], stated: Sequence[str], rng: random.Random) -> str:
    values = say_goal({slot: goal[slot] for slot in stated})
    want = rng.choice(("i want", "i need", "i would like"))
    what = f"a {values}" if "thing" in stated else f"something {values}"
    polite = rng.choice(("", "please"))
    return " ".join(f"{rng.choice(GREETINGS)} {want} {what} {polite}".split())
