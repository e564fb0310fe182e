"""The page in headless Chromium, from a file and from the server; no transcript can run code in it."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.patience import patience, wait_until
from tests.run.report.conftest import metrics_row, reply, write_lines
from tests.run.report.test_report import two_runs
from upshot.core.files import append_jsonl, read_jsonl
from upshot.run.folder import RunFolder
from upshot.run.report.report import write_report
from upshot.run.report.server import make_app

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]

playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright here; `pip install playwright` brings it")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; `apt-get install chromium` brings one")

Open = Callable[..., Any]
Serve = Callable[..., str]
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all tests of this file."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=patience(60) * 1000)
        yield browser
        browser.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves run folders, each with its own server thread; returns the address."""
    import uvicorn

    with ExitStack() as servers:

        def start(*folders: Path) -> str:
            options = uvicorn.Config(make_app(folders), port=0, log_level="error", timeout_graceful_shutdown=1)
            server = uvicorn.Server(options)
            thread = threading.Thread(target=server.run)
            thread.start()
            servers.callback(thread.join)
            servers.callback(setattr, server, "should_exit", True)
            wait_until(lambda: server.started)
            return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"

        yield start


@pytest.fixture
def visit(browser: Any, serve: Serve) -> Iterator[Open]:
    """Opens an address; at the end checks that nothing failed and that no request left the page's own origin.

    Pages are closed before the servers stop (hence the second fixture), because a page that follows a run keeps sending
    requests.
    """
    pages: list[tuple[Any, str, list[str], list[str]]] = []

    def go(address: str, **options: Any) -> Any:
        page = browser.new_page(**options)
        page.set_default_timeout(patience(30) * 1000)
        troubles: list[str] = []
        requests: list[str] = []
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda said: troubles.append(said.text) if said.type == "error" else None)
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        page.wait_for_selector("main > *", state="attached")
        pages.append((page, address.partition("#")[0], troubles, requests))
        return page

    yield go
    for page, address, troubles, requests in pages:
        page.close()
        assert troubles == []
        own = address if address.startswith("http") else "file:"
        assert [url for url in requests if not url.startswith((own, "blob:"))] == []


def texts(page: Any, selector: str) -> list[str]:
    """The texts of the matching elements, once there are any: a live page requests what it draws."""
    page.locator(selector).first.wait_for(state="attached")
    return page.locator(selector).all_text_contents()


def until(page: Any, expression: str) -> None:
    """Wait until something is true in the page; evaluated from outside, since the page's policy forbids evaluation."""
    wait_until(lambda: page.evaluate(expression))


def tab(page: Any, name: str) -> None:
    page.click(f"[data-tab={name}]")
    page.wait_for_selector(f"[data-tab={name}][aria-current=true]")


def test_every_tab_is_drawn_and_the_list_filters(synthetic_run: Path, visit: Open) -> None:
    page = visit(write_report(synthetic_run).as_uri())
    assert page.text_content("h1").strip() == "quickstart finished"
    assert page.locator(".headline tbody tr").count() == 3
    reasons = page.inner_text("table.missing >> nth=0") + page.inner_text("table.missing >> nth=1")
    assert "judge: timeout" in reasons and "user: budget" in reasons
    assert "last line is incomplete" in page.inner_text(".notes")
    assert "demo-run" not in page.inner_text("table.runs"), "the folder of a demonstration is no run"

    tab(page, "curves")
    titles = page.locator("figcaption span").evaluate_all("all => all.map((e) => e.title)")
    assert "reward, difficulty = hard" in titles and "mean" in titles
    plot = page.locator(".chart[data-title=mean]")
    assert plot.locator("path.curve").count() == 2 and plot.locator(".gap").count() == 4
    box = plot.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 4, box["y"] + 20)
    told = page.inner_text(".tip")
    assert "step 60" in told and "multiturn" in told and "single-reply" in told
    page.check(".bar input[type=checkbox]")
    assert plot.locator("path.raw").count() == 2

    tab(page, "conversations")
    page.wait_for_selector(".reading .turn.trained")
    chips = page.locator(".list .chip")
    assert chips.count() == 16
    page.select_option("label:has-text('Missing') select", "!")
    left = chips.count()
    assert 0 < left < 16
    page.select_option("label:has-text('Missing') select", "")
    page.fill(".controls .search", "reward<0.5 large blue tent")
    until(page, "document.querySelector('.side .note').textContent.includes('24 prompt') === false")
    until(page, "decodeURIComponent(location.hash).includes('find=reward')")
    rewards = [float(text.replace("−", "-").rstrip("!")) for text in texts(page, ".list .chip")]
    assert rewards and max(rewards) < 0.5 and "large blue tent" in page.inner_text(".list")

    tab(page, "recipe")
    assert "samples: 3" in page.locator(".recipe >> nth=0").text_content()


def test_a_reply_is_shown_beside_its_goal_and_reached_by_keys(visit: Open, synthetic_run: Path) -> None:
    page = visit(write_report(synthetic_run).as_uri() + "#conversations")
    page.wait_for_selector(".reading .turn.trained")
    first = page.inner_text(".reading h3")
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('.reading h3').textContent.includes('reply 2 of 4')")
    page.keyboard.press("ArrowDown")
    until(page, "document.querySelector('.reading h3').textContent.includes('goal-001 · reply 1')")
    page.click(".promptgroup >> nth=0 >> p")
    until(page, f"document.querySelector('.reading h3').textContent === {json.dumps(first)}")
    page.keyboard.press("o")
    assert page.locator(".reading .future[open]").count() == page.locator(".reading .future").count() > 1
    assert "hidden thought" in page.inner_text(".reading")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.press("Escape")
    for theme in ("light", "dark"):
        page.keyboard.press("t")
        assert page.evaluate("document.documentElement.dataset.theme") == theme
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 27)"
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1


def test_an_address_names_run_step_and_reply_and_bars_are_to_scale(tmp_path: Path, visit: Open) -> None:
    page = visit(write_report(two_runs(tmp_path / "runs")).as_uri() + "#conversations/one/3/r3%230")
    page.wait_for_selector(".reading .turn")
    shown = page.inner_text(".reading")
    assert "one 3" in shown and "the goal of one" in page.inner_text("aside.wanted") and '"answer": 3' in shown
    assert page.evaluate("location.hash") == "#conversations/one/3/r3%230", "as it was written"
    assert page.locator(".reward .fill").get_attribute("style").startswith("left:0%;width:25%"), "of the run's widest"
    page.evaluate("location.hash = '#conversations/two/4'")
    page.get_by_text("two 4").last.wait_for()
    assert page.evaluate("location.hash") == "#conversations/two/4/r4%230"
    page.evaluate("location.hash = '#conversations/two/17/r17%230'")
    page.get_by_text("(two, 17, r17#0) is not on this page").wait_for()
    page.evaluate("location.hash = '#overview'")
    page.wait_for_selector("table.runs")
    table = page.inner_text("table.runs")
    assert "recipe-one" in table and "warm-start: step 300, rl: step 20" in table and "running" in table
    assert page.text_content("h1").strip() == "2 runs: recipe-one, recipe-two"


HOSTILE = {
    "script": "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 2'>",
    "ansi": "\x1b[31mred\x1b[2J\x1b]0;title\x07 \x00 \x08",
    "long": "y" * 1_000_000,
    "right-to-left": "\u202eevil\u2066 \u200f\u061c",
    "surrogate": "lone \ud800 and \udfff",
    "javascript:window.owned=3": "<a href='javascript:window.owned=3'>x</a>",
}


def hostile_run(folder: Path) -> Path:
    folder.mkdir()
    rows = []
    for number, (name, text) in enumerate(HOSTILE.items()):
        scores = {text[:200]: {"value": 1.0, "detail": {text[:200]: text[:200]}}, "b": {"missing": text[:200]}}
        turn = {
            "role": text[:200] if number % 2 else "assistant",
            "content": text,
            "trained": True,
            "note": {"thought": text[:5000]},
        }
        future = {"messages": [turn], "by": text[:200], "cut": number % 2, "missing": text[:200], "scores": scores}
        reward = {"total": {"value": 0.5}, "terms": scores, "means": scores, "parts": {"main": {"value": 0.5}}}
        credit = [{"start": 0, "stop": 3, "parts": [text[:200]], "advantage": 0.5, "text": text[:2000]}]
        hidden = {"goal": text[:5000], "reference": {text[:99]: text[:99]}, "groups": {text[:99]: text[:99]}}
        row = {"step": 1, "row": name, "key": text[:99], "messages": [{"role": "user", "content": text}, turn]}
        rows.append(row | hidden | {"futures": [future], "reward": reward, "credit": credit})
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = HOSTILE["script"]
    line = {"step": 1, "phase": script, f"{script}/x": 1.0, f"missing/{script}": 2.0, f"by/{script}={script}/r": 1.0}
    write_lines(folder / "metrics.jsonl", [line, {**line, "step": 2, f"{script}/x": 2.0}])
    (folder / "recipe.yaml").write_text(f"name: {json.dumps(script)}\nseed: 1\n")
    (folder / "status.json").write_text(json.dumps({"state": script, "reason": script, "alarms": [script]}))
    (folder / "table.json").write_text(
        json.dumps({"title": script, "columns": [script], "rows": [[script]], "finding": script, "winner": script})
    )
    return folder


@pytest.mark.parametrize("live", [False, True])
def test_hostile_text_is_shown_and_has_no_effect(live: bool, tmp_path: Path, serve: Serve, visit: Open) -> None:
    run = hostile_run(tmp_path / "run")

    def look(address: str) -> None:
        page = visit(address)
        for name in ("overview", "curves", "recipe", "conversations"):
            tab(page, name)
        page.wait_for_selector(".promptgroup")
        for number, (name, text) in enumerate(HOSTILE.items()):
            shown = f"document.querySelector('.reading h3')?.textContent.includes({json.dumps(name)})"

            def opened(shown: str = shown) -> bool:
                return bool(page.evaluate(shown))

            # The list scrolls to what was opened before: a click may hit the neighbour, so click again, as readers do.
            while not opened():
                page.locator(".promptgroup p").nth(number).click()
                with suppress(AssertionError):
                    wait_until(opened, 5.0)
            for mode in ("none", "advantage"):
                page.click(f"[data-colour={mode}]")
                shown = page.text_content(".reading")
                assert (text[:50] if name != "surrogate" else "lone") in shown
        page.evaluate(f"location.hash = {json.dumps('#goal/' + quote(HOSTILE['script']))}")
        page.get_by_text("No reply to").wait_for()
        assert page.evaluate("typeof window.owned") == "undefined"
        assert page.evaluate("document.images.length + document.querySelectorAll('main script, iframe').length") == 0
        links = page.locator("a").evaluate_all("all => all.map((e) => e.getAttribute('href'))")
        assert all(link.startswith("#") for link in links)

    look(serve(run) if live else write_report(run).as_uri())


def test_a_live_run_is_followed_without_a_reload(synthetic_run: Path, serve: Serve, visit: Open) -> None:
    import random

    run = synthetic_run / "single-reply"
    (run / "status.json").write_text(json.dumps({"state": "running", "step": 60, "steps": 70, "eta_seconds": 61}))
    address = serve(run)
    page = visit(address)
    page.wait_for_selector("text=about 1 min 1 s left")
    assert "running" in page.inner_text("h1") and "live" in page.inner_text("h1")
    tab(page, "conversations")
    page.wait_for_selector(".reading .turn.trained")
    assert "Step 60" in page.inner_text(".reading h3")
    read = page.inner_text(".reading h3")
    more = reply(random.Random(5), 61, 0, 0, 1.0)
    more["row"] = "the newest goal"
    append_jsonl(run / "rollouts.jsonl", [more])
    append_jsonl(run / "metrics.jsonl", [metrics_row(random.Random(5), "single-reply", "rl", 61, 70)])
    (run / "status.json").write_text(json.dumps({"state": "finished", "step": 61}))
    page.wait_for_selector(".list >> text=the newest goal")
    assert page.inner_text(".reading h3") == read, "what is read stays"
    page.wait_for_selector("h1 >> text=finished")
    assert "step 61" in page.inner_text(".facts")
    # A resumed run drops what it wrote after its last checkpoint.
    write_lines(run / "rollouts.jsonl", read_jsonl(run / "rollouts.jsonl")[:16])
    until(page, "document.querySelector('.side .note').textContent.includes('16 replies')")
    page.goto(address + "#curves")
    page.wait_for_selector(".chart[data-title=mean] path.curve")


def test_only_the_visible_part_of_a_long_list_is_in_the_page(tmp_path: Path, serve: Serve, visit: Open) -> None:
    rows = [
        {"step": 1 + n // 1000, "row": f"r{n}", "key": f"r{n}#0", "group": n, "reward": {"total": {"value": n / 5000}}}
        | {"messages": [{"role": "user", "content": f"prompt {n}"}, {"role": "assistant", "content": "ok"}]}
        for n in range(5000)
    ]
    (tmp_path / "run").mkdir()
    write_lines(tmp_path / "run" / "rollouts.jsonl", rows)
    address = serve(tmp_path / "run")
    page = visit(address + "#conversations")
    page.wait_for_selector(".reading .turn")
    page.select_option("label:has-text('Step') select", "all")
    page.get_by_text("5,000 prompt groups, 5,000 replies").wait_for()
    assert page.locator(".promptgroup").count() < 40
    page.evaluate("document.querySelector('.list').scrollTop = 1e9")
    page.wait_for_selector(".promptgroup >> text=prompt 4999")
    page.fill(".controls .search", "prompt 1234")
    page.get_by_text("1 prompt group, 1 reply").wait_for()
    until(page, "document.querySelector('.reading h3').textContent.includes('r1234')")


def seeds(folder: Path) -> Path:
    """Two seeds of one experiment, and a run with another learning rate."""
    for name, seed, lr, value in (("a-1", 1, 0.1, 0.2), ("a-2", 2, 0.1, 0.4), ("b", 1, 0.5, 0.9)):
        run = folder / name
        run.mkdir(parents=True)
        (run / "recipe.yaml").write_text(f"name: x\nseed: {seed}\ntrain: {{lr: {lr}}}\n")
        (run / "status.json").write_text(json.dumps({"state": "finished", "started": 1e9 + value, "seconds": 5.0}))
        rows = [{"phase": "rl", "step": step, "reward/mean": value * step, "train/flat": 3.0} for step in (1, 2, 3)]
        write_lines(run / "metrics.jsonl", [{**row, "reward/again": row["reward/mean"]} for row in rows])
        said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"{name} says", "trained": True}]
        lines = [
            {
                "step": step,
                "row": "one goal",
                "key": f"k{step}",
                "messages": said,
                "reward": {"total": {"value": value}},
            }
            for step in (1, 3)
        ]
        write_lines(run / "rollouts.jsonl", lines)
    return folder


def test_runs_are_compared_by_results_keys_bands_and_the_same_goal(tmp_path: Path, serve: Serve, visit: Open) -> None:
    folder = seeds(tmp_path / "sweep")
    address = serve(folder / "a-1", folder / "a-2", folder / "b")
    page = visit(address)
    page.wait_for_selector("table.runs")
    heads = texts(page, "table.runs th")
    assert "train.lr" in heads and "seed" in heads
    cells = [texts(page, f"table.runs tbody tr >> nth={row} >> td") for row in range(3)]
    assert cells[2][:5][0].startswith("b") and cells[2][3:5] == ["2.7", "2.7"] and "0.5" in cells[2]
    assert page.inner_text("table.runs .plus-text") == "2.7"
    tab(page, "curves")
    assert texts(page, ".legend .key") == ["a-1 (2 seeds)", "b"]
    plot = page.locator(".chart[data-title=mean]")
    assert plot.locator("path.curve").count() == 2 and plot.locator("polygon.band").count() == 1
    folded = page.locator(".folded").text_content()
    assert "train/flat" in folded and "the same curve as reward/mean" in folded
    assert page.locator(".chart").count() == 1
    plot.hover()
    with page.expect_download() as saved:
        plot.locator("text=csv").click()
    table = Path(saved.value.path()).read_text().splitlines()
    assert table[0] == "curve,step,value,low,high" and table[1].startswith("a-1 (2 seeds),1,0.30")
    assert table[1].endswith(",0.2,0.4")
    with page.expect_download() as saved:
        plot.locator("text=svg").click()
    assert Path(saved.value.path()).read_text().startswith("<svg") and saved.value.suggested_filename == "mean.svg"
    tab(page, "recipe")
    assert texts(page, ".diff tbody th") == ["seed", "train.lr"]
    assert texts(page, ".diff tbody tr >> nth=1 >> td") == ["0.1", "0.1", "0.5"]
    tab(page, "conversations")
    page.click("text=the same goal across steps and runs")
    page.wait_for_selector("table.goal >> text=a-2 says")
    assert texts(page, "table.goal thead th") == ["run", "step 1", "step 3"]
    assert page.locator("table.goal tbody tr").count() == 3


def token_run(folder: Path) -> Path:
    """A reply with tokens, two credited spans, and a tree of futures that fork twice, credited along it."""
    from upshot.core.conversation import Conversation, Message, Row, Sample, Turn
    from upshot.rollout.reply import Rollout
    from upshot.run.folder import RunFolder

    folder.mkdir()
    pieces = {5: "Which", 6: " size", 7: "?", 8: "<end>"}
    sample = Sample(context=(1, 2), ids=(5, 6, 7, 8), logprobs=(-0.1, -4.0, -0.5, 0.0), finish="stop")
    turn = Turn(Message("assistant", "Which size?"), sample=sample)
    conversation = Conversation(Row("r", ()), 0, "r#0", [Turn(Message("user", "a bag")), turn])
    RunFolder(folder).write_samples(1, [Rollout(conversation)], lambda ids: [pieces[token] for token in ids])

    def future(path: list[int], advantage: float) -> dict[str, Any]:
        said = [
            ("user", "small"),
            ("assistant", f"turn of way {path[0]}"),
            ("user", "thanks"),
            ("assistant", f"leaf {path}"),
        ]
        branches = [
            {"start": 2, "reward": 0.5, "advantage": 0.25 - path[0]},
            {"start": 4, "reward": 1.0, "advantage": advantage},
        ]
        messages = [{"role": role, "content": text, "trained": False} for role, text in said]
        worth = {"verifier": {"value": 1.0}, "token_amount": {"value": 30.0}}
        forked = {"shared": 2, "by": "user", "turn": 0, "cut": 0, "path": path, "forks": [2, 4], "branches": branches}
        return {"key": f"r#0/future/{path}", "messages": messages, "missing": None, "scores": worth, **forked}

    row = {
        "step": 1, "row": "r", "key": "r#0", "goal": "a small bag", "group": 0,
        "messages": [
            {"role": "user", "content": "a bag"}, {"role": "assistant", "content": "Which size?", "trained": True}
        ],
        "futures": [future([way, leaf], leaf - 0.5) for way in (0, 1) for leaf in (0, 1)],
        "reward": {
            "total": {"value": 0.7}, "parts": {"main": {"value": 0.5}, "classmate": {"value": 0.2}},
            "terms": {"verifier": {"value": 0.8}, "token_amount": {"value": -0.3}},
            "means": {"verifier": {"value": 1.0}, "token_amount": {"value": 30.0}}, "extrinsic": 0.8, "intrinsic": -0.3,
        },
        "credit": [
            {"start": 2, "stop": 4, "parts": ["main"], "advantage": 0.5},
            {"start": 4, "stop": 6, "parts": ["main", "classmate"], "advantage": -0.25},
        ],
    }  # fmt: skip
    write_lines(folder / "rollouts.jsonl", [row])
    return folder


@pytest.mark.parametrize("live", [False, True])
def test_tokens_are_coloured_and_futures_form_a_tree_with_advantages(
    live: bool, tmp_path: Path, serve: Serve, visit: Open
) -> None:
    run = token_run(tmp_path / "run")

    def look(address: str) -> None:
        page = visit(address + "#conversations")
        page.wait_for_selector(".passage .tint")
        assert texts(page, ".passage .tint") == ["Which", " size", "?", "<end>"]
        kinds = page.locator(".passage .tint").evaluate_all("all => all.map((e) => e.className.trim())")
        assert kinds == ["tint plus", "tint plus", "tint minus extra", "tint minus extra"]
        page.hover(".passage .tint >> nth=1")
        told = page.inner_text(".tokeninfo")
        assert "token 3 (id 6)" in told and "log-probability −4" in told and "advantage +0.5" in told
        page.click("[data-colour=logprob]")
        dark = page.locator(".passage .tint").evaluate_all(
            "all => all.map((e) => e.style.getPropertyValue('--strength'))"
        )
        assert [float(value) for value in dark] == [0.02, 0.8, 0.1, 0.0]
        page.click("[data-colour=part]")
        assert "main + classmate" in page.inner_text(".colours")
        assert "colour=part" in page.evaluate("location.hash")
        page.keyboard.press("o")
        assert texts(page, ".tree .future > summary b") == [
            "Branch 1", "Future 1.1", "Future 1.2", "Branch 2", "Future 2.1", "Future 2.2"
        ]  # fmt: skip
        assert page.locator("text=turn of way 0").count() == 1, "what branches share is told once"
        marks = texts(page, ".tree .turn.assistant .who .plus-text, .tree .turn.assistant .who .minus-text")
        assert [mark.split()[1] for mark in marks] == ["+0.25", "−0.5", "+0.5", "−0.75", "−0.5", "+0.5"]
        assert "what was achieved +0.8, how it was said −0.3, classmate +0.2" in page.inner_text(".reward")
        penalised = page.locator(".tree .barrow", has_text="token_amount").locator(".fill").first
        assert "minus" in (penalised.get_attribute("class") or ""), "more of what is penalised is not green"

    look(serve(run) if live else write_report(run).as_uri())


def spoken_tree(folder: Path) -> Path:
    """A reply whose two futures fork again, as a run writes it, with the tokens of each later turn of the policy."""
    from upshot.core.conversation import Conversation, Message, Row, Sample
    from upshot.core.score import Score
    from upshot.rewards.credit import Credit, MetricWeight, Reward, Span
    from upshot.rollout.credit.rules import grow
    from upshot.rollout.reply import Future, Rollout
    from upshot.run.folder import RunFolder

    def speak(conversation: Conversation, user: str, *ids: int) -> None:
        conversation.say(Message("user", user))
        sample = Sample((1, 2), ids, tuple(-0.5 * number for number in range(len(ids))), "stop")
        conversation.say(Message("assistant", " ".join(f"w{number}" for number in ids)), sample)

    episode = Conversation(Row("r", (Message("user", "a bag"),)), 0, "r#0")
    speak(episode, "please", 10, 11)
    futures = []
    for way in (0, 1):
        branch = episode.fork("future", way)
        speak(branch, "small", 20 + way, 30)
        for leaf in (0, 1):
            end = branch.fork("future", leaf)
            speak(end, "thanks", 40 + 2 * way + leaf)
            score = {"verifier": Score(float(way and leaf))}
            futures.append(Future(end, 3, "user", scores=score, path=(way, leaf), forks=(3, 5)))
    siblings = grow(futures, {"verifier": MetricWeight(1.0)})
    for branches, values in zip(siblings, [(-0.25, 0.25), (), (-0.5, 0.5)], strict=True):
        for one, value in zip(branches, values, strict=False):
            one.advantages = [value] * len(one.credit.spans)
    total = Score(0.25)
    reply = Rollout(episode, futures=futures, siblings=siblings, reward=Reward(total))
    reply.credit, reply.advantages = Credit({"main": total}, (Span(2, 4),)), [0.5]
    run = RunFolder(folder)
    run.write_samples(1, [reply], lambda ids: [f" w{number}" for number in ids])
    run.append_rollouts([reply.to_dict(1)])
    return folder


@pytest.mark.parametrize("live", [False, True])
def test_what_the_policy_said_in_futures_is_coloured_by_its_own_advantage(
    live: bool, tmp_path: Path, serve: Serve, visit: Open
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run = spoken_tree(folder)

    def look(address: str) -> None:
        page = visit(address + "#conversations")
        page.wait_for_selector(".tree .passage .tint")
        page.keyboard.press("o")
        tones = "all => all.map((e) => [e.textContent.trim(), e.classList[1]])"
        shown = page.locator(".tree .passage .tint").evaluate_all(tones)
        assert shown == [
            ["w20", "minus"], ["w30", "minus"], ["w40", "none"], ["w41", "none"],
            ["w21", "plus"], ["w30", "plus"], ["w42", "minus"], ["w43", "plus"],
        ]  # fmt: skip
        page.hover(".tree .passage .tint >> nth=1")
        told = page.inner_text(".tree .tokeninfo >> nth=0")
        assert "token 7 (id 30)" in told and "advantage −0.25" in told and "earns main = 0" in told
        assert "siblings' mean 0.25" in told and "siblings' mean 0.25" in page.inner_text(
            ".tree > .future > summary >> nth=0"
        )
        marks = texts(page, ".tree .turn.assistant .mark")
        assert marks == ["trained", "not trained", "not trained", "trained", "trained", "trained"], "fork by fork"
        page.hover(".tree .passage .tint >> nth=2")
        assert "no sibling that earned more or less" in page.inner_text(".tree .tokeninfo >> nth=1")
        page.click("[data-colour=logprob]")
        assert page.locator(".tree .future[open]").count() == 6, "what was open stays open"
        dark = "all => all.map((e) => e.style.getPropertyValue('--strength'))"
        strengths = page.locator(".tree .passage .tint").evaluate_all(dark)
        assert [float(value) for value in strengths] == [0, 0.1, 0, 0, 0, 0.1, 0, 0]

    look(serve(run) if live else write_report(run).as_uri())


def test_a_demonstration_opens_with_its_finding(synthetic_run: Path, visit: Open) -> None:
    table = json.loads((synthetic_run / "table.json").read_text())
    chosen = next(row for row in read_jsonl(synthetic_run / "multiturn" / "rollouts.jsonl") if len(row["futures"]) > 1)
    curve = {"title": "asks", "lines": [{"name": "multiturn", "x": [1, 2], "y": [0.1, 0.9]}]}
    table |= {"finding": "It learned to ask.", "winner": "multiturn-aware reward", "curve": curve}
    (synthetic_run / "table.json").write_text(
        json.dumps(table | {"example": ["multiturn", chosen["step"], chosen["key"]]})
    )
    page = visit(write_report(synthetic_run).as_uri())
    assert page.inner_text("main .card >> nth=0 >> .lead") == "It learned to ask."
    page.wait_for_selector(".fork .way")
    assert page.locator(".fork .way").count() == len(chosen["futures"][:3])
    assert page.locator(".finding .chart[data-title=asks] path.curve").count() == 1
    assert "multiturn-aware reward" in page.inner_text(".winner")
    assert "no status" not in page.inner_text("body")
    above = visit(write_report(synthetic_run.parent, synthetic_run.parent / "all.html").as_uri())
    above.wait_for_selector(".fork .way")
    assert above.locator(".fork .way").count() == len(chosen["futures"][:3]), "seen from the folder above, too"
    (synthetic_run / "table.json").write_text(json.dumps(table))
    bare = visit(write_report(synthetic_run).as_uri())
    box, chart = (bare.locator(place).bounding_box() for place in (".finding", ".finding .chart"))
    assert chart["width"] > 0.9 * box["width"] - 60, "without an example nothing is left empty"


NAMES = ("constructor", "__proto__", "toString", "hasOwnProperty")


@pytest.mark.parametrize("live", [False, True])
def test_names_of_built_in_properties_work_like_any_other(
    live: bool, tmp_path: Path, serve: Serve, visit: Open
) -> None:
    """A reward term named `constructor` once blanked the page."""
    run = tmp_path / "run"
    run.mkdir()
    scores = {name: {"value": 0.5} for name in NAMES}
    rewards: list[dict[str, Any]] = [{"terms": scores, "means": scores}, {"terms": {}, "means": {}}]
    rows = [
        {"step": 1, "row": name, "key": name, "messages": [{"role": "assistant", "content": "hi", "trained": True}]}
        | {"groups": {NAMES[number]: name} if number < 3 else {}, "futures": [{"messages": [], "scores": scores}]}
        | {"reward": {"total": {"value": 0.5}, "parts": {"main": {"value": 0.5}}} | rewards[number % 2]}
        for number, name in enumerate(NAMES)
    ]
    write_lines(run / "rollouts.jsonl", rows)
    write_lines(run / "metrics.jsonl", [{"step": step, **dict.fromkeys(NAMES, step / 2)} for step in (1, 2)])
    (run / "status.json").write_text(json.dumps({"state": "constructor"}))

    def look(address: str) -> None:
        page = visit(address)
        for name in ("overview", "curves", "recipe", "conversations"):
            tab(page, name)
        page.wait_for_selector(".promptgroup")
        assert page.locator(".promptgroup").count() == 4
        assert set(NAMES) <= set(texts(page, ".reading .reward .barname"))
        page.fill(".controls .search", "constructor>0.2")
        page.get_by_text("2 prompt groups, 2 replies").wait_for()

    look(serve(run) if live else write_report(run).as_uri())


def test_curves_are_drawn_over_steps_time_or_tokens(tmp_path: Path, visit: Open) -> None:
    run = tmp_path / "run"
    run.mkdir()
    rows = [{"phase": "rl", "step": n, "reward/mean": n / 9, "time/step": 30.0, "train/tokens": 5000} for n in range(9)]
    write_lines(run / "metrics.jsonl", rows)
    page = visit(write_report(run).as_uri() + "#curves")
    drawing = ".chart[data-title=mean] svg"

    def ticks() -> str:
        return str(page.locator(drawing).last.text_content())

    assert "over step" in page.locator(drawing).get_attribute("aria-label")
    page.select_option("select.axis", "time")
    page.wait_for_selector(f"{drawing}[aria-label$='over time']")
    assert "1:40" in ticks()
    page.select_option("select.axis", "tokens")
    page.wait_for_selector(f"{drawing}[aria-label$='over tokens trained']")
    assert "20 k" in ticks()
    page.hover(f"{drawing}")
    assert "tokens" in page.inner_text(".tipstep")


def test_a_note_and_tags_of_a_run_are_shown(tmp_path: Path, visit: Open) -> None:
    folders = two_runs(tmp_path)
    RunFolder(folders / "one").write_notes(note="the <b>good</b> one", tags=["baseline", "keep", "keep"])
    page = visit(write_report(folders).as_uri())
    line = page.inner_text("table.runs tbody tr >> nth=0")
    assert "the <b>good</b> one" in line and "baseline" in line and line.count("keep") == 1
    alone = visit(write_report(folders / "one").as_uri())
    assert "the <b>good</b> one" in alone.inner_text("header") and "baseline" in alone.inner_text("header .tags")


def test_two_conversations_are_shown_side_by_side_with_differences_marked(tmp_path: Path, visit: Open) -> None:
    run = tmp_path / "run"
    run.mkdir()
    said = ["Which size would you like, small or large?", "Which colour would you like, small or large?"]
    rows = [
        {"step": 1, "row": "tent", "group": 0, "key": f"tent#{at}"}
        | {"messages": [{"role": "user", "content": "a tent"}, {"role": "assistant", "content": text, "trained": True}]}
        | {"reward": {"total": {"value": 0.25 + at / 2}, "means": {"asks": {"value": float(at)}}}}
        for at, text in enumerate(said)
    ]
    write_lines(run / "rollouts.jsonl", rows)
    address = write_report(run).as_uri()
    page = visit(f"{address}#conversations/run/1/tent%230")
    page.wait_for_selector("button.compare")
    assert "group mean 0.5 of 2" in page.inner_text(".reward")
    page.click("button.compare")
    page.get_by_text("Open another reply").wait_for()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".versus ins")
    assert (texts(page, ".versus del"), texts(page, ".versus ins")) == (["size"], ["colour"])
    row = page.inner_text(".versus-scores tbody tr >> nth=0").split()
    assert row == ["reward", "0.25", "0.75", "+0.5"]
    again = visit(page.evaluate("location.href"))
    again.wait_for_selector(".versus ins")
    again.click("button.compare")
    until(again, "document.querySelector('.versus') === null")


@pytest.mark.parametrize("shown", ["phone, one run", "desk, classmates", "desk, live, three runs"])
def test_nothing_overflows_and_axe_finds_no_serious_violation(
    shown: str, synthetic_run: Path, classmate_run: Path, serve: Serve, visit: Open
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="`pip install axe-playwright-python`")
    phone = "phone" in shown
    size = {"width": 375, "height": 700} if phone else {"width": 1280, "height": 900}

    def look(address: str) -> None:
        page = visit(address, viewport=size, color_scheme="dark" if phone else "light", bypass_csp=True)
        for name in ("overview", "curves", "conversations", "recipe"):
            tab(page, name)
            if name == "conversations":
                page.wait_for_selector(".reading h3")
                page.keyboard.press("o")
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, name
            found = [fault for fault in axe.Axe().run(page).response["violations"] if fault["impact"] in SERIOUS]
            assert [(fault["id"], fault["nodes"][0]["html"][:200]) for fault in found] == [], name

    run = synthetic_run / "multiturn" if phone else classmate_run
    look(serve(synthetic_run) if "live" in shown else write_report(run).as_uri())


def test_a_folder_with_one_file_draws_without_errors(synthetic_run: Path, tmp_path: Path, visit: Open) -> None:
    for name in ["recipe.yaml", "metrics.jsonl", "rollouts.jsonl", "table.json", "status.json"]:
        source = synthetic_run / name if (synthetic_run / name).exists() else synthetic_run / "multiturn" / name
        alone = tmp_path / name.partition(".")[0]
        alone.mkdir()
        shutil.copy(source, alone / name)
        page = visit(write_report(alone).as_uri())
        for tab_name in ("overview", "curves", "conversations", "recipe"):
            tab(page, tab_name)
            assert page.locator("#panel > *").count() == 1


def test_sparse_replies_draw_without_errors(tmp_path: Path, visit: Open) -> None:
    rows: list[dict[str, Any]] = [
        {"step": 1},
        {"step": 1, "messages": [{"role": "user", "content": "hi"}], "futures": None, "reward": None},
        {"messages": [{"role": "tool"}], "reward": {"total": {"missing": "x"}}, "credit": [], "futures": [{}]},
        {"step": 2, "row": "r", "reward": {"total": {"value": 0}}, "messages": [{"content": None}], "groups": {"a": 1}},
        {
            "step": 2,
            "credit": [{"start": 0, "stop": 2}],
            "messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}],
        },
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = visit(write_report(tmp_path).as_uri() + "#conversations")
    page.select_option("label:has-text('Step') select", "all")
    until(page, "document.querySelectorAll('.list .chip').length === 5")
    for index in range(5):
        page.locator(".list .chip").nth(index).click()
        page.wait_for_selector(
            f".list .chip.open[data-reply='{page.locator('.list .chip').nth(index).get_attribute('data-reply')}']"
        )


def test_a_thought_its_classmates_and_what_its_tokens_earned_are_shown(classmate_run: Path, visit: Open) -> None:
    logged = read_jsonl(classmate_run / "rollouts.jsonl")[0]
    place = "/".join(
        quote(str(part), "") for part in ("conversations", classmate_run.name, logged["step"], logged["key"])
    )
    page = visit(write_report(classmate_run).as_uri() + "#" + place)
    page.wait_for_selector(".classmate")
    assert texts(page, ".classmate h5 b") == ["smol", "Qwen/Qwen3-0.6B"]
    asked = [future for future in logged["futures"] if future["cut"]]
    told = {0.0: "wrong", 1.0: "right", None: "missing: timeout"}
    assert texts(page, ".classmate .verdict") == [told[future["scores"]["classmate"].get("value")] for future in asked]
    assert "saw tokens 23 to 36 (14)" in page.inner_text(".classmate h5 >> nth=0")
    page.evaluate("document.querySelector('.classmate .answer').open = true")
    assert "####" in page.inner_text(".classmate .answer .says >> nth=0")
    assert page.locator(".tree .future").count() == 1 and "The reply itself" in page.inner_text(".tree")
    assert texts(page, ".passage .tint") == [span["text"] for span in logged["credit"]]
    assert texts(page, ".passage .extra") == [logged["credit"][1]["text"]]
    assert texts(page, ".parts .barname") == ["main", "classmate", "verifier"]
    page.click("[data-colour=none]")
    assert logged["messages"][-1]["note"]["thought"] in page.inner_text(".turn.trained .thought[open]")

    tab(page, "curves")
    groups = page.locator(".group > summary").evaluate_all("all => all.map((e) => e.firstChild.data)")
    assert {"reward", "by part", "by classmate", "classmate"} <= set(groups) and "part" not in groups
    scores = page.locator(".group", has=page.locator("summary", has_text="by classmate"))
    assert scores.locator("[data-title=score] path.curve").count() == 2
