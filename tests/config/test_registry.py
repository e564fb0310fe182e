"""Names to classes, with errors that say what to write instead."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from upshot.config.registry import Registry
from upshot.core.errors import UserError
from upshot.rewards.metric import metrics


class Thing:
    def __init__(self, size: int, label: str = "x", helper: object = None) -> None:
        self.size, self.label, self.helper = size, label, helper


things: Registry[Thing] = Registry("thing", "upshot.rewards.metrics", base=Thing)
things.register("thing", "alias")(Thing)


def test_a_name_an_alias_and_a_path_give_the_same_class() -> None:
    assert things.get("thing") is things.get("alias") is Thing
    assert things.get(f"{__name__}:Thing") is Thing


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown metric 'verifer' in reward.metrics; did you mean 'verifier'\?"):
        metrics.get("verifer", "reward.metrics")


def test_an_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown option 'labl' of thing 'thing'; did you mean 'label'\?"):
        things.create("thing", {"size": 1, "labl": "y"})


def test_an_option_of_the_wrong_type_is_named_with_its_value() -> None:
    with pytest.raises(UserError, match="thing 'thing': size = 'big': input should be a valid integer"):
        things.create("thing", {"size": "big"})


def test_a_required_option_that_is_missing_is_named() -> None:
    with pytest.raises(UserError, match="needs the option 'size'"):
        things.create("thing", {})


def test_options_passed_on_to_a_base_class_are_checked_as_its_own() -> None:
    class Special(Thing):
        def __init__(self, colour: str = "red", **rest: object) -> None:
            super().__init__(**rest)  # type: ignore[arg-type]
            self.colour = colour

    things.register("special")(Special)
    made = things.create("special", {"size": "2", "colour": "blue"}, helper="me")
    assert (made.size, made.helper, made.colour) == (2, "me", "blue")  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"unknown option 'sise' of thing 'special'; did you mean 'size'\?"):
        things.create("special", {"sise": 1})


def test_context_reaches_only_classes_that_ask_for_it() -> None:
    made = things.create("thing", {"size": "3"}, helper="me", nobody="asked")
    assert (made.size, made.helper) == (3, "me")


@pytest.mark.parametrize("path", ["no_such_package.mod:Thing", "upshot.core.score:Scor"])
def test_an_import_path_that_leads_nowhere_says_so(path: str) -> None:
    with pytest.raises(UserError, match=r"cannot import|did you mean 'Score'"):
        things.get(path)


def test_two_classes_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two things are called 'thing'"):
        things.register("thing")(int)


@dataclass(frozen=True)
class Taste:
    """Options of one class, grouped."""

    spice: str
    heat: int = 1


@things.register("dish")
class Dish:
    def __init__(self, helper: str, options: Taste) -> None:
        self.helper, self.options = helper, options


def test_options_may_be_grouped_in_a_dataclass() -> None:
    made = things.create("dish", {"spice": "pepper", "heat": "3"}, helper="me")
    assert (made.helper, made.options) == ("me", Taste("pepper", 3))
    with pytest.raises(UserError, match="unknown option 'spise' of thing 'dish'; did you mean 'spice'"):
        things.create("dish", {"spise": "pepper"}, helper="me")
    with pytest.raises(UserError, match="thing 'dish': 'spice' is required but not set"):
        things.create("dish", {}, helper="me")
    with pytest.raises(UserError, match="thing 'dish': heat = 'much': input should be a valid integer"):
        things.check("dish", {"heat": "much"})
