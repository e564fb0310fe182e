"""Which language a text is in, by py3langid's model (it comes with the package; nothing is downloaded).

Covers the languages that IFEval's own detector tells apart, and whatever else a constraint names if the model knows it.
"""

from __future__ import annotations

import re
from copy import copy
from functools import lru_cache
from typing import Any

LATIN = "af ca cs cy da de en es et fi fr hr hu id it lt lv nl no pl pt ro sk sl so sq sv sw tl tr vi"
OTHER_SCRIPTS = "ar bg bn el fa gu he hi ja kn ko mk ml mr ne pa ru ta te th uk ur zh"
"""Languages that are never written in ASCII letters."""
LANGUAGES = (*LATIN.split(), *OTHER_SCRIPTS.split())
SURE = 0.5
"""From this probability of the best guess on, the text is in that language and in no other."""
POSSIBLE = 0.1
"""Below it: whether a text is in a language at least so likely, relative to the best guess, is open."""


def is_language(text: str, code: str) -> bool | None:
    """Whether a text is in the language of an ISO 639-1 code; None where two words, or none, do not tell."""
    code = code.lower().split("-")[0]
    text = text[:20_000]
    if not re.search(r"[^\W\d_]", text):
        return None
    if code in OTHER_SCRIPTS.split() and text.isascii():
        return False
    ranked = dict(model("" if code in LANGUAGES else code).rank(text))
    if code not in ranked:
        return None
    likelihood, second = sorted(ranked.values(), reverse=True)[:2]
    if ranked[code] == likelihood > second:
        return True
    return None if likelihood < SURE and ranked[code] >= POSSIBLE * likelihood else False


@lru_cache(maxsize=8)
def model(also: str = "") -> Any:
    """The model of the languages above, and of one more where it knows that."""
    identifier = copy(_model_of_all())
    # Only these: dialects and neighbours (Luxembourgish, Aragonese …) would take short German or Spanish texts away.
    identifier.set_languages([*LANGUAGES, *({also} & set(identifier.labels))])
    return identifier


@lru_cache(maxsize=1)
def _model_of_all() -> Any:
    """The model of all languages, which takes half a second to load; a selection of its columns takes 2 ms."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
