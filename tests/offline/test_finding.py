"""What a demonstration's page opens with: a sentence, the curve of asking, and a reply that asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from upshot.core.files import write_jsonl
from upshot.offline.demo.quickstart import show_asking, tell_finding


def row(name: str, score: float, asks: float) -> list[Any]:
    other = {"value": 9.0, "low": 8.0, "high": 10.0}
    return [name, {"value": score}, other, other, {"value": asks}, other]


def test_the_finding_compares_the_last_row_with_the_one_before() -> None:
    rows = [row("warm start", 0.2, 0.1), row("single-reply reward", 0.04, 0.0), row("multiturn reward", 0.912, 0.99)]
    assert tell_finding(rows)["finding"] == (
        "Multiturn reward: 99 % of the ambiguous requests are asked about and 91 % end right; "
        "single-reply reward: 0 % and 4 %."
    )
    assert tell_finding([row("a", 0.1, 0.1), ["b", "–", "–", "–", "–", "–"]]) == {}, "nothing was measured"


def reply(step: int, said: str, opening: str = "ambiguous", turns: int = 1) -> dict[str, Any]:
    messages = [{"role": "user", "content": "i need a rug"}] * turns + [{"role": "assistant", "content": said}]
    future = {"messages": [{"role": "user", "content": "tall"}]}
    return {"step": step, "key": f"{step}/{said}", "opening": turns, "messages": messages} | {
        "groups": {"opening": opening},
        "futures": [future, future],
    }


def test_asking_is_counted_by_step_over_ambiguous_first_requests(tmp_path: Path) -> None:
    for name, rows in {
        "guess": [reply(1, "here is a rug")],
        "to-ask": [
            reply(1, "which size"), reply(1, "here is a rug"), reply(2, "which size"),
            reply(2, "here is a rug", "unambiguous"), reply(2, "here is a rug", turns=2),
        ],
    }.items():  # fmt: skip
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "rollouts.jsonl", rows)
    told = show_asking(tmp_path, ["guess", "to ask"])
    assert [(line["x"], line["y"]) for line in told["curve"]["lines"]] == [([1], [0.0]), ([1, 2], [0.5, 1.0])]
    assert told["example"] == ["to-ask", 2, "2/which size"]
    assert "example" not in show_asking(tmp_path, ["guess"])
