"""A user's metric is shown under the name that its author gave it."""

from __future__ import annotations

import upshot
from upshot.rewards.build import metric_labels


def test_a_function_is_shown_by_its_own_name_unless_another_metric_has_it() -> None:
    assert metric_labels(["verifier", "__main__:polite", "document->my:bleu"]) == {
        "verifier": "verifier",
        "__main__:polite": "polite",
        "document->my:bleu": "document->my:bleu",
    }
    assert metric_labels(["a:polite", "b:polite"]) == {"a:polite": "a:polite", "b:polite": "b:polite"}
    assert metric_labels(["here:polite-2", "well-known"]) == {"here:polite-2": "polite", "well-known": "well-known"}
    assert metric_labels(["my:verifier"]) == {"my:verifier": "my:verifier"}, "the task's verdict is something else"


def test_terms_means_and_futures_name_a_notebooks_function_as_it_is_called() -> None:
    def polite(conversation: upshot.Conversation) -> float:
        last = conversation.last("assistant")
        return float(last is not None and "please" in last.content)

    messages = [{"role": "user", "content": "Some tea."}]
    reply = upshot.reward(messages, "Which one, please?", rounds=0, metrics={polite: 0.5})
    assert {name: term.value for name, term in reply.reward.terms.items()} == {"polite": 0.5}
    assert [*reply.reward.means] == ["polite"] and [[*future.scores] for future in reply.futures] == [["polite"]]
