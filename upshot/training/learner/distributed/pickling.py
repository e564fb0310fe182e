"""Replies and numbers as bytes, from one rank to another. No torch."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

from upshot.core.conversation import Conversation, Row, Turn
from upshot.core.errors import UserError


class _Pickler(pickle.Pickler):
    """Leaves behind what a conversation is held with and cannot be carried: a lock, a connection, its random stream."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is Conversation:
            session = {name: value for name, value in thing.session.items() if _portable(value)}
            return _conversation, (
                (thing.row, thing.seed, thing.key, thing.turns),
                {"ended": thing.ended, "session": session, "turn_scores": thing.turn_scores},
            )
        return NotImplemented


def dumps(thing: Any) -> bytes:
    """Anything as bytes."""
    out = io.BytesIO()
    try:
        _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(thing)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UserError(
            f"what was played cannot be handed to the other ranks: {error}; "
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


def _conversation(path: tuple[Row, int, str, tuple[Turn, ...]], state: Mapping[str, Any]) -> Conversation:
    conversation = Conversation(*path)
    for name, value in state.items():
        setattr(conversation, name, value)
    return conversation
