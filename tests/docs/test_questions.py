"""What a new user searches for is in a heading of the questions page; the site's search ranks headings above text."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import DOCS

PAGE = (DOCS / "questions.md").read_text()
HEADINGS = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
SEARCHED = [
    "lora",
    "wandb",
    "system prompt",
    "own data",
    "resume run",
    "missing score",
    "table results",
    "several gpus",
    "multi-gpu",
    "reward model",
    "memory 7b",
    "time 7b",
    "estimator signature",
    "custom estimator",
    "mac",
    "macos",
    "windows",
]


@pytest.mark.parametrize("words", SEARCHED)
def test_a_new_users_words_are_in_the_heading_of_one_answer(words: str) -> None:
    found = [heading for heading in HEADINGS if all(word in heading.lower() for word in words.split())]
    assert len(found) == 1, f"{len(found)} headings of docs/questions.md have '{words}'"


def test_every_answer_leads_to_the_page_that_says_more() -> None:
    answers = re.split(r"^## .+$", PAGE, flags=re.MULTILINE)[1:]
    assert len(answers) == len(HEADINGS) and all("](" in answer for answer in answers)
