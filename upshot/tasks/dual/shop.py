"""A shop's service line: parcels, refunds and a phone line; some steps only the customer can take.

"please refund order 17": a lost parcel is refunded at once, one that arrived only after the customer has sent it back.
"my phone line is dead": the policy can switch the line on, but only the customer can restart the box at home. The
verdict depends on the final state and not on what was said. Everything is generated from a seed, in a language of about
120 words that a new tiny model learns in a minute.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upshot.config.bounds import Made, Share, Whole
from upshot.core.conversation import Conversation, Message, Row, Tools, derive_seed
from upshot.core.score import Score
from upshot.tasks.base import Task, last_reply, tasks
from upshot.tasks.participants.base import Observation, Participant, User
from upshot.tasks.participants.dual import SharedState, act_as_user
from upshot.tasks.participants.tools import ToolEnvironment, ToolRequest

ORDERS = [str(number) for number in range(10, 70)]
KINDS = ("lost", "arrived", "line", "box")
"""The kinds of problems, in the order of groups."""
ASKED = {"send it back": ("send_back", "i sent it back"), "restart your box": ("restart_box", "i restarted it")}
"""What the customer can be asked to do: the words, the tool, and the customer's answer."""
PATIENCE = 2
"""How often the customer asks what is meant before leaving."""
WORDS = "please refund order my phone line is dead what do you mean i sent it back restarted restart your box send done"
ANSWERS = "[look] [refund] [check_line] [switch_on] error: no such lost arrived back refunded on off ok"


def look(shop: dict[str, Any], order: str) -> str:
    """What became of an order's parcel."""
    return str(_order(shop, order)["parcel"])


def refund(shop: dict[str, Any], order: str) -> str:
    """Pay an order back."""
    _order(shop, order)["refunded"] = True
    return "refunded"


def check_line(shop: dict[str, Any]) -> str:
    """What the phone line lacks: line, box, or nothing (ok)."""
    return "line off" if not shop["line"] else "box off" if not shop["box"] else "ok"


def switch_on(shop: dict[str, Any]) -> str:
    """Switch the phone line on at the exchange."""
    shop["line"] = True
    return "on"


def hang_up(shop: dict[str, Any]) -> str:
    """End the call."""
    return "done"


def send_back(shop: dict[str, Any], order: str) -> str:
    """Take the parcel of an order to the post."""
    bought = _order(shop, order)
    if bought["parcel"] != "arrived":
        raise ValueError("no such parcel")
    bought["parcel"] = "back"
    return "sent"


def restart_box(shop: dict[str, Any]) -> str:
    """Restart the box at home."""
    shop["box"] = True
    return "restarted"


def _order(shop: dict[str, Any], order: str) -> dict[str, Any]:
    if order not in shop["orders"]:
        raise ValueError("no such order")
    return shop["orders"][order]  # type: ignore[no-any-return]


@dataclass(eq=False)
class Caller(User):
    """Does what it is asked if it can, says so, and leaves when the policy says that all is done."""

    tools: ToolEnvironment

    async def observe(self, conversation: Conversation) -> Observation:
        """Do what the policy asks, and answer."""
        request = last_reply(conversation)
        for words, (tool, answer) in ASKED.items():
            if words in request:
                arguments = {"order": conversation.row.goal} if tool == "send_back" else {}
                acts = await act_as_user(self.tools, [ToolRequest("", tool, arguments)], conversation)
                text = answer if acts[0]["good"] else acts[0]["answer"]
                return self.reply(text, {"user_turns": 1.0, "user_acts": 1.0}, {"acts": acts})
        asked = sum(message.content == "what do you mean" for message in conversation.messages)
        if "done" in request.split() or asked >= PATIENCE:
            return self.reply("", {"user_ended": 1.0}, done=True)
        return self.reply("what do you mean", {"user_turns": 1.0})


def call(name: str, order: str = "") -> str:
    """A tool call as the tiny policy writes it: valid JSON in few words."""
    return f"{_head(name)} " + (f'"{order}" }}}}</tool_call>' if order else "}}</tool_call>")


def _head(name: str) -> str:
    argument = '"order":' if name in ("look", "refund") else ""
    return f'<tool_call>{{"name":"{name}","arguments":{{{argument}'


@tasks.register("shop")
class ShopTask(Task):
    """Callers of a shop, tools for both sides, and demonstrations that mostly omit the caller's part."""

    def __init__(self, rows_per_split: Made = 2000, asking: Share = 0.15, seed: Whole = 0) -> None:
        """asking: the share of the demonstrations that ask the caller to do its part; the others do without."""
        self.size, self.asking, self.seed = rows_per_split, asking, seed
        policy, user = (look, refund, check_line, switch_on, hang_up), (send_back, restart_box)
        self.state = SharedState(lambda row: row.meta["shop"], policy, user, [hang_up], role="user")

    def environment(self) -> Participant:
        """The policy's tools."""
        return self.state.policy

    def user_tools(self) -> ToolEnvironment:
        """The caller's."""
        return self.state.user

    def user(self) -> Participant:
        """The caller."""
        return Caller(self.state.user)

    def tools(self) -> Tools:
        """Definitions of the policy's tools."""
        return self.state.policy.definitions()

    def vocabulary(self) -> list[str]:
        """Every word of the little language."""
        calls = [_head(name) for name in self.state.policy.tools]
        quoted = [f'"{order}"' for order in ORDERS]
        return sorted({*WORDS.split(), *ANSWERS.split(), *calls, *ORDERS, *quoted, "}}</tool_call>"})

    def rows(self, split: str) -> list[Row]:
        """Calls, with an equal share of each kind."""
        self.check_split(split)
        return [self._row(split, number) for number in range(self.size)]

    def groups(self, row: Row) -> Mapping[str, str]:
        """Whether the caller has something to do."""
        return {"part": "both" if row.meta["kind"] in ("arrived", "box") else "policy"}

    async def verify(self, conversation: Conversation) -> Score:
        """1 if the final state of the shop is right, else 0."""
        return Score(float(self.state.of(conversation) == conversation.row.reference))

    def dialogues(self, split: str) -> list[tuple[Message, ...]]:
        """Demonstrations; most omit the caller's part: they refund a parcel that is not back, or switch the line on."""
        return [self._dialogue(self._row(split, number)) for number in range(self.size)]

    def _row(self, split: str, number: int) -> Row:
        rng = random.Random(derive_seed(self.seed, "shop", split, number))
        kind = rng.choice(KINDS)
        order, other = rng.sample(ORDERS, 2)
        parcel = kind if kind in ("lost", "arrived") else rng.choice(("lost", "arrived"))
        orders = {name: {"parcel": p, "refunded": False} for name, p in ((order, parcel), (other, "arrived"))}
        shop = {"orders": orders, "line": kind != "line", "box": kind != "box"}
        right: dict[str, Any] = copy.deepcopy(shop) | {"line": True, "box": True}
        wish = "my phone line is dead"
        if kind in ("lost", "arrived"):
            wish = f"please refund order {order}"
            right["orders"][order] = {"parcel": "back" if kind == "arrived" else kind, "refunded": True}
        meta = {"kind": kind, "shop": shop}
        return Row(f"shop/{split}/{number}", (Message("user", wish),), order, right, self.name, meta)

    def _dialogue(self, row: Row) -> tuple[Message, ...]:
        rng = random.Random(derive_seed(self.seed, "demo", row.id))
        asks, kind, order = rng.random() < self.asking, row.meta["kind"], row.goal
        if kind in ("lost", "arrived"):
            steps = [(call("look", order), f"[look] {kind}")]
            if kind == "arrived" and asks:
                steps.append(("please send it back", "i sent it back"))
            steps.append((call("refund", order), "[refund] refunded"))
        else:
            steps = [(call("check_line"), f"[check_line] {kind} off")]
            if kind == "box" and asks:
                steps.append(("please restart your box", "i restarted it"))
            else:
                steps.append((call("switch_on"), "[switch_on] on"))
        talk = [Message(role, text) for step in steps for role, text in zip(("assistant", "user"), step, strict=True)]
        return (*row.messages, *talk, Message("assistant", "done"))
