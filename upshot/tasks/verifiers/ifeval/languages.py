"""Which language a text is in, by its script and, for shared scripts, by its commonest words. Rough, no model."""

from __future__ import annotations

import re

SCRIPTS: dict[str, str] = {
    "ar": "\u0600-\u06ff", "fa": "\u0600-\u06ff", "ur": "\u0600-\u06ff",
    "he": "\u0590-\u05ff", "hi": "\u0900-\u097f", "mr": "\u0900-\u097f", "ne": "\u0900-\u097f",
    "bn": "\u0980-\u09ff", "pa": "\u0a00-\u0a7f", "gu": "\u0a80-\u0aff", "ta": "\u0b80-\u0bff",
    "te": "\u0c00-\u0c7f", "kn": "\u0c80-\u0cff", "ml": "\u0d00-\u0d7f", "th": "\u0e00-\u0e7f",
    "ko": "\uac00-\ud7af", "ja": "\u3040-\u30ff", "zh": "\u4e00-\u9fff", "el": "\u0370-\u03ff",
    "ru": "\u0400-\u04ff", "uk": "\u0400-\u04ff", "bg": "\u0400-\u04ff",
}  # fmt: skip
"""Characters of the languages that have a script other than Latin."""

COMMON: dict[str, str] = {
    "en": "the and of to is in that it for was with you this are on be as have not",
    "es": "el la de que y los en las un una por con para es se del no su está como",
    "pt": "o de que e do da em um uma para com não os no na por mais as dos é você",
    "fr": "le la les de des et est un une que dans pour qui du sur avec au ce il pas en vous",
    "de": "der die und das ist nicht ein eine zu den mit von für auf dem es sich im auch sie",
    "it": "il di che la e un per è non una sono con del le si da gli della come anche",
    "nl": "de het een en van is dat niet te in op voor met zijn die aan er maar ook",
    "pl": "i w na nie się z do jest to że o jak po co ale dla od ich przez są",
    "fi": "ja on ei se että hän oli mutta ovat tai kun niin kuin myös voi ole tämä jos",
    "sw": "na ya wa kwa ni katika la za kuwa hii cha yake watu ambayo au kama sana hiyo",
    "vi": "và của là có các không được cho một trong người với những này để đã khi từ",
    "sv": "och att det som en på är av för med den till inte om ett har de jag",
    "ru": "и в не на что он с как это по но из у за от так же для был вы",
    "uk": "і в не на що він з як це до але із у за від так для був та є ви",
    "bg": "и в не на че той с как това по но от за е да се са ще или ви",
    "ar": "في من على إلى أن هذا التي الذي ما لا كان عن مع هو هي",
    "fa": "و در به از که این است را با برای آن یک می های شما",
    "ur": "کے کی میں کا ہے اور سے کو نے پر یہ ہیں کہ ایک",
    "hi": "के है और का में की से को यह हैं पर एक नहीं ने कि",
    "mr": "आहे आणि या च्या ते हे की मध्ये एक नाही होते ला आहेत",
    "ne": "छ र को मा लाई यो हो पनि एक गर्न भने छन् थियो",
}  # fmt: skip
"""Commonest words of the languages that share a script."""

_SETS = {code: frozenset(text.split()) for code, text in COMMON.items()}


def is_language(text: str, code: str) -> bool:
    """Whether a text is in the language of an ISO 639-1 code; a text too short to tell is given the benefit."""
    code = code.lower().split("-")[0]
    text = text[:20_000]
    letters = re.findall(r"[^\W\d_]", text)
    if not letters:
        return True
    script = SCRIPTS.get(code)
    inside = len(re.findall(f"[{script}]", text)) if script else sum(_is_latin(letter) for letter in letters)
    if code == "ja":
        return inside >= 0.1 * len(letters)  # kana among kanji
    if inside < 0.6 * len(letters):
        return False
    rivals = [other for other in _SETS if SCRIPTS.get(other) == script]
    if code not in _SETS or len(rivals) < 2:
        return True
    found = re.findall(r"[^\W\d_]+", text.lower())
    counts = {other: sum(word in _SETS[other] for word in found) for other in rivals}
    return counts[code] >= max(counts.values()) if max(counts.values()) > 0 else True


def _is_latin(letter: str) -> bool:
    return letter < "\u0250" or "\u1e00" <= letter <= "\u1eff"
