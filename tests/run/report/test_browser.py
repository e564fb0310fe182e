"""The page as a reader meets it, in headless Chromium: it draws, filters, and no transcript runs in it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from tests.run.report.test_report import two_runs
from upshot.core.files import read_jsonl
from upshot.run.report.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"),
    *("--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--no-first-run",
]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; `apt-get install chromium` brings one")

Evaluate = Callable[[str], Awaitable[Any]]


class Tab:
    """One page over the DevTools protocol; remembers what went wrong in it and what it asked the network for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.troubles: list[str] = []
        self.requests: list[str] = []
        self._last = 0

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A DevTools command and its answer."""
        self._last += 1
        await self.socket.send_json({"id": self._last, "method": method, "params": params})
        while True:
            message = await asyncio.wait_for(self.socket.receive_json(), 30)
            self._note(message)
            if message.get("id") == self._last:
                assert "error" not in message, message
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.troubles.append(json.dumps(params["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.troubles.append(params["entry"]["text"])
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def open(self, address: str) -> None:
        """Load a page and wait for it."""
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=address)
        for _ in range(100):
            if await self.evaluate("document.readyState === 'complete' && Boolean(document.querySelector('nav'))"):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"the page did not draw itself: {self.troubles}")


@contextlib.asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Tab]:
    """A fresh browser with one tab; gone afterwards."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port_file = profile / "DevToolsActivePort"
        end = time.monotonic() + 60
        while not (port_file.is_file() and port_file.read_text().strip()):
            assert process.poll() is None and time.monotonic() < end, "Chromium did not start"
            await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                page = next(target for target in await answer.json() if target["type"] == "page")
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        try:
            process.wait()
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def in_page(page: Path, profile: Path, visit: Callable[[Tab], Awaitable[None]], fragment: str = "") -> None:
    """Visit a report from file:// and assert that nothing went wrong and nothing was fetched."""

    async def go() -> None:
        async with chromium(profile) as tab:
            await tab.open(page.as_uri() + fragment)
            await visit(tab)
            assert tab.troubles == []
            assert [url for url in tab.requests if not url.startswith("file:")] == []

    asyncio.run(go())


def test_every_tab_draws_and_the_browser_filters(synthetic_run: Path, tmp_path: Path) -> None:
    async def visit(tab: Tab) -> None:
        assert await tab.evaluate("document.querySelector('h1').textContent") == "quickstart finished"
        assert await tab.evaluate("document.querySelectorAll('.headline tbody tr').length") == 3
        reasons = await tab.evaluate("document.querySelector('table.missing').innerText")
        assert "judge: timeout" in reasons and "user: budget" in reasons
        assert "last line is incomplete" in await tab.evaluate("document.querySelector('.notes').innerText")

        await tab.evaluate("document.querySelector('[data-tab=curves]').click()")
        titles = await tab.evaluate("[...document.querySelectorAll('figcaption span')].map((e) => e.title)")
        assert "reward, difficulty = hard" in titles and "mean" in titles
        plot = "[...document.querySelectorAll('.chart')].find((e) => e.dataset.title === 'mean')"
        assert await tab.evaluate(f"{plot}.querySelectorAll('path.curve').length") == 2
        assert await tab.evaluate(f"{plot}.querySelectorAll('.gap').length") == 4
        box = f"{plot}.querySelector('.plot')"
        await tab.evaluate(
            f"{{const r = {box}.getBoundingClientRect(); {box}.dispatchEvent(new PointerEvent('pointermove',"
            "{clientX: r.right - 4, clientY: r.top + 20, bubbles: true}))}"
        )
        told = await tab.evaluate("document.querySelector('.tip').innerText")
        assert "step 60" in told and "multiturn" in told and "single-reply" in told
        await tab.evaluate("document.querySelector('.bar input[type=checkbox]').click()")
        assert await tab.evaluate(f"{plot}.querySelectorAll('path.raw').length") == 2

        await tab.evaluate("document.querySelector('[data-tab=conversations]').click()")
        assert await tab.evaluate("document.querySelectorAll('.list .chip').length") == 16
        assert await tab.evaluate("document.querySelectorAll('.reading .turn.trained').length") == 1
        assert await tab.evaluate("document.querySelectorAll('.reading .future').length") >= 2
        assert "hidden thought" in await tab.evaluate("document.querySelector('.reading').innerText")
        await tab.evaluate("document.querySelector('.controls input[type=checkbox]').click()")
        left = await tab.evaluate("document.querySelectorAll('.list .chip').length")
        assert 0 < left < 16

        await tab.evaluate("document.querySelector('[data-tab=recipe]').click()")
        assert "samples: 3" in await tab.evaluate("document.querySelector('.recipe').innerText")

    in_page(write_report(synthetic_run), tmp_path / "profile", visit)


def test_an_address_names_run_step_and_reply_and_bars_are_to_scale(tmp_path: Path) -> None:
    async def visit(tab: Tab) -> None:
        async def go(fragment: str) -> str:
            await tab.evaluate(f"location.hash = {json.dumps(fragment)}")
            await asyncio.sleep(0.1)
            return str(await tab.evaluate("document.querySelector('main').innerText"))

        shown = await tab.evaluate("document.querySelector('.reading').innerText")
        assert "one 3" in shown and "the goal of one" in shown and '"answer": 3' in shown
        assert await tab.evaluate("location.hash") == "#conversations/one/3/r3%230", "as it was written"
        assert await tab.evaluate("document.querySelector('.reward .fill').style.width") == "25%", "of the run's widest"
        assert "two 4" in await go("#conversations/two/4")
        assert await tab.evaluate("location.hash") == "#conversations/two/4/r4%230"
        assert "(two, 17, r17#0) is not on this page" in await go("#conversations/two/17/r17%230")
        await go("#overview")
        table = await tab.evaluate("document.querySelector('table.runs').innerText")
        assert "recipe-one" in table and "warm-start: step 300, rl: step 20" in table and "running" in table
        assert await tab.evaluate("document.querySelector('h1').textContent.trim()") == "runs"

    page = write_report(two_runs(tmp_path / "runs"))
    in_page(page, tmp_path / "profile", visit, "#conversations/one/3/r3%230")


def address(run: Path, place: int) -> str:
    """The address of a reply of a run's log."""
    reply = read_jsonl(run / "rollouts.jsonl")[place]
    return "#" + "/".join(quote(str(part), "") for part in ("conversations", run.name, reply["step"], reply["key"]))


def test_hostile_text_is_shown_and_does_not_run(synthetic_run: Path, tmp_path: Path) -> None:
    async def visit(tab: Tab) -> None:
        shown = await tab.evaluate("document.querySelector('.reading').innerText")
        assert "</script><script>window.owned = 1</script><img src=x" in shown
        assert await tab.evaluate("typeof window.owned") == "undefined"
        assert await tab.evaluate("document.images.length") == 0

    in_page(write_report(synthetic_run), tmp_path / "profile", visit, address(synthetic_run / "multiturn", -1))


def test_nothing_overflows_a_phone(synthetic_run: Path, tmp_path: Path) -> None:
    async def visit(tab: Tab) -> None:
        await tab.call("Emulation.setDeviceMetricsOverride", width=375, height=700, deviceScaleFactor=2, mobile=True)
        for name in ("overview", "curves", "conversations", "recipe"):
            await tab.evaluate(f"document.querySelector('[data-tab={name}]').click()")
            assert await tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, name

    in_page(write_report(synthetic_run), tmp_path / "profile", visit)


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", "rollouts.jsonl", "table.json", "status.json"])
def test_a_folder_with_one_file_draws_without_errors(name: str, synthetic_run: Path, tmp_path: Path) -> None:
    source = synthetic_run / name if (synthetic_run / name).exists() else synthetic_run / "multiturn" / name
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(source, alone / name)

    async def visit(tab: Tab) -> None:
        for tab_name in ("overview", "curves", "conversations", "recipe"):
            await tab.evaluate(f"document.querySelector('[data-tab={tab_name}]').click()")
            assert await tab.evaluate("document.querySelector('#panel').childElementCount") == 1

    in_page(write_report(alone), tmp_path / "profile", visit)


def test_sparse_replies_draw_without_errors(tmp_path: Path) -> None:
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

    async def visit(tab: Tab) -> None:
        await tab.evaluate("for (const s of document.querySelectorAll('.stepper button')) s.click()")
        count = await tab.evaluate("document.querySelectorAll('.list .chip').length")
        for index in range(count):
            await tab.evaluate(f"document.querySelectorAll('.list .chip')[{index}].click()")

    in_page(write_report(tmp_path), tmp_path / "profile", visit, "#conversations")


def test_a_thought_its_classmates_and_what_its_tokens_earned_are_shown(classmate_run: Path, tmp_path: Path) -> None:
    async def visit(tab: Tab) -> None:
        reply = json.loads((classmate_run / "rollouts.jsonl").read_text().splitlines()[0])
        thought = await tab.evaluate("document.querySelector('.turn.trained .thought[open]').innerText")
        assert reply["messages"][-1]["note"]["thought"] in thought
        names = await tab.evaluate("[...document.querySelectorAll('.classmate h5 b')].map((e) => e.textContent)")
        assert names == ["smol", "Qwen/Qwen3-0.6B"]
        asked = [future for future in reply["futures"] if future["cut"]]
        marks = await tab.evaluate("[...document.querySelectorAll('.classmate .verdict')].map((e) => e.textContent)")
        told = {0.0: "wrong", 1.0: "right", None: "missing: timeout"}
        assert marks == [told[future["scores"]["classmate"].get("value")] for future in asked]
        assert "saw tokens 23 to 36 (14)" in await tab.evaluate("document.querySelector('.classmate h5').innerText")
        await tab.evaluate("document.querySelector('.classmate .answer').open = true")
        assert "####" in await tab.evaluate("document.querySelector('.classmate .answer .says').innerText")
        assert await tab.evaluate("document.querySelectorAll('.tree .future').length") == 1
        assert "The reply itself" in await tab.evaluate("document.querySelector('.tree').innerText")
        tinted = await tab.evaluate("[...document.querySelectorAll('.passage .tint')].map((e) => e.textContent)")
        assert tinted == [span["text"] for span in reply["credit"]]
        extra = await tab.evaluate("[...document.querySelectorAll('.passage .extra')].map((e) => e.textContent)")
        assert extra == [reply["credit"][1]["text"]]
        parts = await tab.evaluate("[...document.querySelectorAll('.parts .barname')].map((e) => e.textContent)")
        assert parts == ["main", "classmate", "verifier"]

        await tab.evaluate("document.querySelector('[data-tab=curves]').click()")
        groups = await tab.evaluate("[...document.querySelectorAll('.group > summary')].map((e) => e.firstChild.data)")
        assert {"reward", "by part", "by classmate", "classmate"} <= set(groups) and "part" not in groups
        scores = "[...document.querySelectorAll('.group')].find((e) => e.innerText.startsWith('by classmate'))"
        assert await tab.evaluate(f"{scores}.querySelectorAll('[data-title=score] path.curve').length") == 2
        await tab.call("Emulation.setDeviceMetricsOverride", width=375, height=700, deviceScaleFactor=2, mobile=True)
        await tab.evaluate("document.querySelector('[data-tab=conversations]').click()")
        assert await tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0

    in_page(write_report(classmate_run), tmp_path / "profile", visit, address(classmate_run, 0))
