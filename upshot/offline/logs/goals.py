"""Each user's goal and facts: a model extracts them as strict JSON; each fact is checked against the user's words."""

from __future__ import annotations

from typing import Any

from upshot.config.sampling import Sampling
from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.models.base import Model
from upshot.models.structured import ask_json
from upshot.offline.job import Job
from upshot.offline.logs.read import LoggedConversation
from upshot.offline.logs.store import TalkStore
from upshot.tasks.participants.ask import object_schema
from upshot.tasks.participants.templates import as_lines
from upshot.tasks.users.quality import words

QUESTION = """Below is a conversation of a user with an assistant. Say what the user wanted, which facts only the user \
could know (numbers, names, wishes; in the user's own words, a short phrase each), and how the user talks (a few words).

{conversation}"""
TEXT = {"type": "string"}
SCHEMA = object_schema({"goal": TEXT, "facts": {"type": "array", "items": TEXT}, "persona": TEXT})


async def extract_goals(job: Job, model: Model, store: TalkStore, known: dict[str, dict[str, Any]]) -> None:
    """Extract from every conversation that is not in `known`; results go to the job's journal and to `known`."""

    async def one(number: int) -> None:
        (talk,) = store.read("rowid = ?", number)
        prompt = [Message("user", QUESTION.replace("{conversation}", as_lines(talk.messages)))]
        try:
            answer = await ask_json(model, prompt, SCHEMA, Sampling(max_tokens=512, temperature=0.0), "extract")
        except UserError:
            raise
        except Exception as error:
            reason = str(Score.failed(error, "goal").reason)
            job.write({"place": talk.place, "missing": reason}, failure=reason)
        else:
            known[talk.place] = {"place": talk.place, **check_facts(answer, talk)}
            job.write(known[talk.place], failure=None)

    todo = [number for number, place in store.rows("rowid, place") if place not in known]
    await job.run(todo, one, len(known), "goals")


def check_facts(answer: dict[str, Any], talk: LoggedConversation) -> dict[str, Any]:
    """The answer without the facts that the user never said; `dropped` is their number."""
    user_words = {word for m in talk.messages if m.role == "user" and not m.name for word in words(m.content)}
    facts = [fact for fact in answer["facts"] if is_said(fact, user_words)]
    return {**answer, "facts": facts, "dropped": len(answer["facts"]) - len(facts)}


def is_said(fact: str, user_words: set[str]) -> bool:
    """Whether every number, and every word of at least four letters, in a fact is among the user's words."""
    telling = [word for word in words(fact) if len(word) > 3 or any(map(str.isdigit, word))]
    return bool(telling) and all(word in user_words for word in telling)


def goal_text(line: dict[str, Any] | None) -> str:
    """Goal and facts as the simulated user receives them; '' if nothing was extracted."""
    return "" if line is None else "; ".join([line["goal"].strip(), *line["facts"]])


def tell_goals(known: dict[str, dict[str, Any]], talks: int) -> str:
    """How the extraction went, in a line."""
    facts = sum(len(one["facts"]) for one in known.values())
    dropped = sum(one["dropped"] for one in known.values())
    return (
        f"goals: {len(known):,} of {talks:,} conversations, {facts:,} facts; {dropped:,} more were dropped because the "
        "user never said them"
    )
