"""The page is a single file, safe for any conversation, small, and honest about what it leaves out."""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.cli import make_parser
from upshot.core.conversation import Conversation, Message, Row, Sample, Turn
from upshot.core.errors import UserError
from upshot.rollout.reply import Rollout
from upshot.run import report
from upshot.run.folder import RunFolder
from upshot.run.report.page import SCRIPTS, embed, render
from upshot.run.report.report import MAX_TEXT, ROLLOUT_BYTES, ShownRun, shorten_texts, write_report

ASSETS = Path(report.__file__).parent / "assets"


class Elements(HTMLParser):
    """Every element of a page, with the data of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


def embedded(page: Path) -> dict[str, Any]:
    return json.loads(Elements(page.read_text("utf-8")).scripts[0])


def replies_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The replies of a run that the page contains."""
    return [row for packed in run["packed"] for row in json.loads(zlib.decompress(base64.b64decode(packed)))]


def test_the_page_has_no_external_references(synthetic_run: Path) -> None:
    text = write_report(synthetic_run).read_text("utf-8")
    elements = Elements(text)
    outward = {"src", "href", "srcset", "action", "data", "poster", "formaction"}
    assert [(tag, attrs) for tag, attrs in elements.tags if outward & set(attrs)] == []
    assert {tag for tag, _ in elements.tags} == {
        "html", "head", "meta", "title", "style", "body", "div", "noscript", "script"
    }  # fmt: skip
    own = "\n".join((ASSETS / name).read_text("utf-8") for name in [*SCRIPTS, "page.css", "page.html"])
    assert set(re.findall(r"https?://[^\"'\s)]+", own)) == {
        "http://www.w3.org/2000/svg"
    }  # a namespace name, never fetched
    assert not re.search(r"@import|url\(|XMLHttpRequest|WebSocket|import\(", own)
    assert own.count("fetch(") == own.count("new EventSource(") == 1, "of the live page, from its own server"
    policy = next(attrs["content"] or "" for tag, attrs in elements.tags if "http-equiv" in attrs)
    assert policy.startswith("default-src 'none'") and "unsafe-eval" not in policy
    assert "script-src 'sha256-" in policy and "connect-src 'none'" in policy


def test_the_script_never_turns_text_into_markup() -> None:
    own = "\n".join((ASSETS / name).read_text("utf-8") for name in SCRIPTS)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", own)


def test_hostile_text_stays_inside_the_data(synthetic_run: Path) -> None:
    page = write_report(synthetic_run)
    elements = Elements(page.read_text("utf-8"))
    assert len(elements.scripts) == 2
    data = embedded(page)
    texts = [turn["content"] for run in data["runs"] for row in replies_of(run) for turn in row["messages"]]
    hostile = [text for text in texts if "window.owned" in text]
    assert hostile and hostile[0].startswith("</script><script>") and hostile[0].endswith("<!-- %DATA%")
    assert "window.owned" not in elements.scripts[1]


def test_a_hostile_recipe_name_is_escaped_in_the_title(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: '</title><script>alert(1)</script>'\n")
    text = write_report(tmp_path).read_text("utf-8")
    assert "<title>&lt;/title&gt;&lt;script&gt;" in text
    assert len(Elements(text).scripts) == 2


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(json_values)
def test_embedded_json_is_the_same_value_without_markup(value: Any) -> None:
    text = embed(value)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == value


def test_embedded_json_has_neither_nan_nor_lone_surrogates() -> None:
    text = embed({"a": [float("nan"), float("inf")], "b": "\ud800x"})
    assert json.loads(text) == {"a": [None, None], "b": "\ud800x"}
    text.encode("utf-8")


def test_placeholders_in_the_data_are_left_alone() -> None:
    page = render("%SCRIPT%", {"text": "%STYLE% %DATA% %SCRIPT% %TITLE%"})
    assert json.loads(Elements(page).scripts[0])["text"] == "%STYLE% %DATA% %SCRIPT% %TITLE%"


def test_sub_runs_are_shown_side_by_side_in_the_order_they_started(synthetic_run: Path) -> None:
    data = embedded(write_report(synthetic_run))
    assert [run["name"] for run in data["runs"]] == ["demo-run", "warm-start", "single-reply", "multiturn"]
    assert data["title"] == "quickstart"
    assert data["runs"][0]["seconds"] == 201.0 and data["runs"][1]["seconds"] == 61.5
    assert data["runs"][0]["table"]["title"] == "Held-out goals"
    keys = {curve["key"] for curve in data["runs"][3]["curves"]["curves"]}
    assert "by/difficulty=hard/reward" in keys and "reward/mean" in keys


def two_runs(folder: Path) -> Path:
    """Two runs of different recipes in a folder that is not a run itself."""
    for name, state, steps in (("one", "finished", {"warm-start": 300, "rl": 20}), ("two", "running", {"rl": 4})):
        run = folder / name
        run.mkdir(parents=True)
        (run / "recipe.yaml").write_text(f"name: recipe-{name}\n")
        (run / "status.json").write_text(json.dumps({"state": state, "started": 1e9, "time": 1e9, "seconds": 5.0}))
        logged = [{"phase": phase, "step": step, "reward/mean": 0.5} for phase, step in steps.items()]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in logged))
        os.utime(run / "metrics.jsonl", (1e9 + 60, 1e9 + 60))
        rows = [
            {"step": step, "row": f"r{step}", "key": f"r{step}#0", "group": 0, "goal": f"the goal of {name}",
             "reference": {"answer": step}, "messages": [{"role": "user", "content": f"{name} {step}"}], "futures": [],
             "reward": {"total": {"value": value}, "terms": {"verifier": {"value": value}}, "parts": {}}}
            for step, value in ((3, 0.25), (4, 1.0))
        ]  # fmt: skip
        (run / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_folder_of_runs_shows_each_with_its_own_title_state_time_and_steps_by_phase(tmp_path: Path) -> None:
    data = embedded(write_report(two_runs(tmp_path / "runs")))
    assert data["title"] == "2 runs: recipe-one, recipe-two"
    told = [(run["title"], run["status"]["state"], run["seconds"]) for run in data["runs"]]
    assert told == [("recipe-one", "finished", 5.0), ("recipe-two", "running", 65.0)], "a running one runs since"
    assert data["runs"][0]["curves"]["steps_by_phase"] == {"warm-start": 300, "rl": 20}


def test_goal_and_reference_of_a_reply_are_on_the_page(tmp_path: Path) -> None:
    data = embedded(write_report(two_runs(tmp_path / "runs")))
    first = replies_of(data["runs"][0])[0]
    assert first["goal"] == "the goal of one" and first["reference"] == {"answer": 3}


def test_a_killed_run_still_has_its_report(synthetic_run: Path) -> None:
    data = embedded(write_report(synthetic_run))
    notes = [note for run in data["runs"] for note in run["notes"]]
    assert any("multiturn/rollouts.jsonl: the last line is incomplete" in note for note in notes)
    assert len(replies_of(data["runs"][3])) == 96


def test_a_big_run_stays_under_five_megabytes_and_says_what_is_left_out(
    tmp_path: Path, run_maker: Callable[..., Path]
) -> None:
    run = run_maker(tmp_path / "big", steps=400, groups=8, replies=8, every=4)
    assert sum(path.stat().st_size for path in run.rglob("*.jsonl")) > 2 * ROLLOUT_BYTES
    page = write_report(run)
    assert page.stat().st_size < 5_000_000
    data = embedded(page)
    for of in data["runs"][2:]:
        kept = of["index"]["columns"]["step"]
        assert {4, 400} <= set(kept) and len(set(kept)) >= 8
        assert [reply["step"] for reply in replies_of(of)] == kept, "the index says which replies are there"
        assert of["counts"]["replies"] == 6400 > len(kept)
        assert any("of 6,400 replies" in note for note in of["notes"])


def test_long_texts_are_cut_in_the_file_and_say_so() -> None:
    cut = shorten_texts({"messages": [{"content": "x" * (MAX_TEXT + 5)}], "goal": "short"})
    assert cut["goal"] == "short" and cut["messages"][0]["content"].endswith(
        "5 more characters are left out of this file]"
    )


def test_several_folders_are_one_page_with_distinct_names(tmp_path: Path) -> None:
    first, second = two_runs(tmp_path / "a") / "one", two_runs(tmp_path / "b") / "one"
    data = embedded(write_report([first, second], tmp_path / "page.html"))
    assert [run["name"] for run in data["runs"]] == ["a/one", "b/one"] and data["title"] == "2 runs: recipe-one"
    assert [run["experiment"] for run in data["runs"]] == ["a/one", "b/one"], "they name no seed"
    assert data["runs"][0]["result"] == {"key": "reward/mean", "last": 0.5, "best": 0.5}


def test_a_reply_comes_with_its_tokens(tmp_path: Path) -> None:
    run = ShownRun(RunFolder(two_runs(tmp_path) / "one"), "one")
    run.follow()
    assert run.reply(0)["tokens"] == []
    turn = Sample(context=(1, 2), ids=(5, 6, 7), logprobs=(-0.5, -0.25, 0.0), finish="stop", version=0)
    second = Sample(context=(3,), ids=(8,), logprobs=(-1.0,), finish="stop", version=0)
    turns = [Turn(Message("assistant", "…"), sample=turn), Turn(Message("assistant", "…"), sample=second)]
    reply = Rollout(Conversation(Row("r3", ()), 0, "r3#0", turns))
    run.folder.write_samples(3, [reply], lambda ids: [f"«{token}ü»" for token in ids])
    assert run.reply(0)["tokens"] == [
        {"at": 2, "ids": [5, 6, 7], "pieces": ["«5ü»", "«6ü»", "«7ü»"], "logprobs": [-0.5, -0.25, 0.0]},
        {"at": 6, "ids": [8], "pieces": ["«8ü»"], "logprobs": [-1.0]},
    ]
    assert run.folder.samples(3)["r3#0"] == [turn, second]


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl", "status.json", "versions.json", "table.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "null\n", '{"rows": 3}', "\x00\xff"])
def test_a_broken_file_gives_a_sentence_instead_of_a_traceback(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert write_report(tmp_path).is_file()


def test_not_a_run_folder_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="no run folder at"):
        write_report(tmp_path / "nothing")


def test_an_unwritable_target_is_a_user_error(synthetic_run: Path) -> None:
    with pytest.raises(UserError, match="cannot write the report"):
        write_report(synthetic_run, synthetic_run / "recipe.yaml" / "report.html")


def test_the_verb_writes_the_page_and_prints_its_path(
    synthetic_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pages" / "page.html"
    args = make_parser(["view"]).parse_args(["view", str(synthetic_run), "--out", str(out), "--no-open"])
    assert args.run(args) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text("utf-8").startswith("<!doctype html>")
