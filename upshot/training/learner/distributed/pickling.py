"""Replies and numbers as bytes, from one rank to another. No torch."""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any

from upshot.core.conversation import Conversation
from upshot.core.errors import UserError


def dumps(thing: Any) -> bytes:
    """Anything as bytes."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {Conversation: _reduce}
    try:
        pickler.dump(thing)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UserError(
            f"replies cannot be sent to the other ranks: {error}; "
            "rows, notes of turns and details of scores must be plain data when a run has several ranks"
        ) from error
    return out.getvalue()


def loads(data: bytes) -> Any:
    """What `dumps` was given."""
    return pickle.loads(data)


def _portable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def _reduce(conversation: Conversation) -> tuple[Any, ...]:
    """A conversation without what it is held with and cannot be carried: a lock, a connection, its random stream."""
    session = {name: value for name, value in conversation.session.items() if _portable(value)}
    path = conversation.row, conversation.seed, conversation.key, conversation.turns
    names = ("ended", "score", "turn_scores", "counts")
    state = {"session": session, **{name: getattr(conversation, name) for name in names}}
    return Conversation, path, (None, state)  # a class with slots has its state second
