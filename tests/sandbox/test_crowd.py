"""Many requests and many bytes at once: what one asks for or writes does not slow down or displace the others."""

from __future__ import annotations

import asyncio
import re
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.patience import until
from upshot.sandbox import Busy, Limits, Sandbox, StdioTest
from upshot.sandbox.asserts import verdict
from upshot.sandbox.asserts.verdict import Remains
from upshot.sandbox.local.sessions import LocalSession


def test_a_cancelled_request_leaves_the_queue() -> None:
    async def scenario() -> None:
        async with Sandbox(slots=1, queue=1) as sandbox:
            running = asyncio.create_task(sandbox.run("import time; time.sleep(2)"))
            await until(lambda: sandbox.running == 1)
            for _ in range(3):
                waiting = asyncio.create_task(sandbox.run("print(1)"))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert sandbox.waiting == 1
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                assert sandbox.waiting == 0
            assert (await sandbox.run("print(2)")).stdout == "2\n"
            await running

    asyncio.run(scenario())


def test_sessions_opened_at_once_stay_within_the_limit() -> None:
    async def scenario() -> None:
        async with Sandbox(slots=1, max_sessions=2) as sandbox:
            opened = await asyncio.gather(*(sandbox.session() for _ in range(5)), return_exceptions=True)
            assert sum(isinstance(one, LocalSession) for one in opened) == 2
            assert sum(isinstance(one, Busy) for one in opened) == 3
            for one in opened:
                if isinstance(one, LocalSession):
                    await one.aclose()
            async with await sandbox.session() as again:
                assert (await again.turn("1 + 1")).stdout == "2\n"

    asyncio.run(scenario())


def test_half_a_surrogate_pair_in_an_input_reaches_the_program(box: Any) -> None:
    program = "import sys\nprint(len(sys.stdin.buffer.read()))"
    assert box(box.sandbox.run(program, stdin="\ud800")).stdout == "3\n"
    assert box(box.sandbox.test_stdio(program, [StdioTest("\ud800", "3")]))[0].passed


@pytest.mark.parametrize("path", ["'/dev/stdin'", "'/dev/' + 'stdin'", "'/'.join(['/dev', 'stdin'])"])
def test_a_program_may_read_dev_stdin_as_contests_have_it(path: str, box: Any) -> None:
    program = f"print(sum(map(int, open({path}).read().split())))"
    assert box(box.sandbox.test_stdio(program, [StdioTest("1 2\n3", "6")]))[0].passed


def test_an_output_as_long_as_the_expected_one_is_not_cut(box: Any) -> None:
    """The cap on output is against floods; expected output of any length fits, and a flood beyond it is still cut."""
    long = "x" * (3 << 20)
    limits = Limits(output_kb=64)
    for program, passed in ((f"print('x' * {len(long)})", True), (f"print('x' * {4 * len(long)})", False)):
        (result,) = box(box.sandbox.test_stdio(program, [StdioTest("", long)], limits))
        assert result.passed is passed


@pytest.mark.parametrize("name", ["zz", ["a"], 1, None])
def test_lines_about_unrequested_files_are_skipped_cheaply(name: Any) -> None:
    class Counted(str):
        looks = 0

        def __eq__(self, other: object) -> bool:
            Counted.looks += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    wanted = [Counted(f"a{index}") for index in range(200)]
    lines = [{"file": [name, "YQ=="]}] * 200 + [{"file": ["a1", "YQ=="]}]
    result = verdict.of_script(Remains(lines=lines), wanted)
    assert result.files == {"a1": b"a"} and Counted.looks < 1000


def _by_lines(text: str, drawn: bool) -> list[Any]:
    """How an output is compared, written plainly: the words of its non-empty lines, or the lines themselves if blanks
    are a drawing."""
    lines = [line.rstrip() for line in text.split("\n")]
    filled = [index for index, line in enumerate(lines) if line]
    kept = lines[filled[0] : filled[-1] + 1] if filled else []
    return kept if drawn else [line.split() for line in kept if line]


_OUTPUTS = st.text(" \n\t\rab", max_size=8)


@given(_OUTPUTS, _OUTPUTS)
@example("a", " \ra")
def test_outputs_are_equal_if_their_lines_are(actual: str, expected: str) -> None:
    lines = [line.rstrip() for line in expected.split("\n")]
    drawn = any(line[:1] in (" ", "\t") or re.search(r"\S[ \t]{2,}\S", line) for line in lines if line)
    assert verdict.same_output(actual, expected) == (_by_lines(actual, drawn) == _by_lines(expected, drawn))


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("0.3333333333", "0.333333", True),
        ("0.3334", "0.333333", False),
        ("3.0", "3", False),
        ("3", "3.0", True),
        ("1e3", "1000.0", True),
        ("0011", "11", False),
        ("1000001", "1000000", False),
        ("1  2 \n\n3", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        (" 1", "1", True),
        ("nan", "nan", True),
        ("inf", "1.0", False),
        ("1.0.0", "1.0", False),
    ],
)
def test_numbers_and_blanks_are_compared_as_contests_do(printed: str, expected: str, same: bool) -> None:
    assert verdict.same_output(printed, expected) is same


def test_millions_of_lines_are_not_split_to_compare_them_with_one() -> None:
    tracemalloc.start()
    assert not verdict.same_output("x\n" * 1_000_000, "x")
    assert verdict.same_output("\n" * 1_000_000 + "x", "x")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 10 << 20  # a list of a million lines would need more than 50 MB
