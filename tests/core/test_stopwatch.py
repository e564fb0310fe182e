"""Where time goes while several activities overlap."""

from __future__ import annotations

import asyncio

from upshot.core.event_loop import Stopwatch, at_work


def test_time_is_shared_among_active_parts_and_adds_up() -> None:
    now = 0.0
    watch = Stopwatch(lambda: now)

    def after(seconds: float, name: str, by: int) -> None:
        nonlocal now
        now += seconds
        watch.change(name, by)

    after(5, "futures", 1)  # nothing was active before
    after(2, "futures", 1)
    after(0, "futures", 1)
    after(0, "judges", 1)
    after(4, "futures", -3)
    after(1, "judges", -1)
    after(9, "judges", 0)
    assert watch.seconds == {"futures": 2 + 3, "judges": 1 + 1}


def test_two_steps_played_at_once_have_their_own_stopwatches() -> None:
    async def step(name: str) -> dict[str, float]:
        with Stopwatch().running() as watch:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(3):
                    tasks.create_task(work(name))
        return watch.seconds

    async def work(name: str) -> None:
        with at_work(name):
            await asyncio.sleep(0)

    async def main() -> list[dict[str, float]]:
        return list(await asyncio.gather(step("sample"), step("judges")))

    assert [list(seconds) for seconds in asyncio.run(main())] == [["sample"], ["judges"]]
    with at_work("nothing measured"):
        pass
