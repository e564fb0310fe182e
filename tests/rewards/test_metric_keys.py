"""A metric of one's own is logged by the name that its author gave it."""

from upshot.rewards.reward import metric_keys


def test_a_function_is_logged_by_its_own_name_unless_two_end_alike() -> None:
    assert metric_keys(["verifier", "__main__:polite", "document->my:bleu"]) == {
        "verifier": "metric/verifier",
        "__main__:polite": "metric/polite",
        "document->my:bleu": "metric/document->my:bleu",
    }
    assert metric_keys(["a:polite", "b:polite"]) == {"a:polite": "metric/a:polite", "b:polite": "metric/b:polite"}
