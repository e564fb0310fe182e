"""Programs in languages other than Python: compiled once, run on every input, in the row's language."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.patience import patience, slower
from tests.sandbox.conftest import QUICK
from upshot.core.conversation import Row
from upshot.run.checks.data import describe_languages
from upshot.sandbox import Outcome, StdioTest
from upshot.sandbox.local import languages
from upshot.tasks.code import CodeStdio
from upshot.tasks.verifiers.base import verifiers
from upshot.tasks.verifiers.code import language_of
from upshot.tasks.verifiers.programs import program_in

ROOMY = replace(QUICK, cpu_seconds=2.0 * slower(), wall_seconds=patience(10))
PROGRAMS = {
    "c": '#include <stdio.h>\nint main() { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); }',
    "cpp": "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }",
    "bash": "read a b\necho $((a + b))",
    "javascript": "const [a, b] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number)\nconsole.log(a + b)",
}
SUMS = [StdioTest("1 2", "3\n"), StdioTest("20 22\n", "42"), StdioTest("2 2", "5")]


def need(language: str) -> None:
    if why := languages.find_obstacle(language):
        pytest.skip(why)


@pytest.mark.parametrize("language", PROGRAMS)
def test_a_program_is_run_on_every_input_in_its_language(language: str, box: Any) -> None:
    need(language)
    results = box(box.sandbox.test_stdio(PROGRAMS[language], SUMS, ROOMY, language))
    assert [result.outcome for result in results] == ["passed", "passed", "wrong"], results
    assert results[2].detail == "printed '4\\n'"


def test_each_input_has_its_own_outcome(box: Any) -> None:
    need("bash")
    program = (
        "read x\ncase $x in loop) while :; do :; done;; fail) echo no >&2; exit 3;; flood) yes;; "
        'late) (sleep 60; echo late) & echo early;; *) echo "$x"; cat left 2>/dev/null; echo 1 > left;; esac'
    )
    tests = [StdioTest(word, word) for word in ("one", "fail", "flood", "late", "two", "loop", "three")]
    limits = replace(ROOMY, cpu_seconds=0.5, output_kb=64)
    results = box(box.sandbox.test_stdio(program, tests, limits, "bash"))
    outcomes = [str(result.outcome) for result in results]
    assert outcomes == ["passed", "error", "output_limit", "wrong", "wrong", "timeout", "timeout"], results
    assert results[1].detail == "no\n" and results[3].detail == "printed 'early\\n'"


def test_a_program_that_does_not_compile_fails_every_test_with_the_compilers_words(box: Any) -> None:
    need("c")
    results = box(box.sandbox.test_stdio("int main( {", SUMS, ROOMY, "c"))
    assert {result.outcome for result in results} == {Outcome.ERROR}
    assert "it does not compile" in results[0].detail and "error:" in results[0].detail


def test_a_language_that_is_not_installed_is_not_the_programs_failure(box: Any) -> None:
    for language, why in (("brainfuck", "is not known"), ("go", "is not installed here")):
        if language == "go" and not languages.find_obstacle("go"):
            continue
        for work in (
            box.sandbox.test_stdio("x", SUMS, ROOMY, language),
            box.sandbox.test_program("x", ["y"], ROOMY, language=language),
        ):
            results = box(work)
            assert {(result.outcome, result.value) for result in results} == {(Outcome.INVALID_TEST, None)}
            assert why in results[0].detail


def test_asserts_of_another_language_fail_or_are_unconfirmed(box: Any) -> None:
    need("cpp")
    program, tests = "int add(int a, int b) { return a + b; }", [
        "#include <cassert>\nint main() { assert(add(1, 2) == 3); }",
        "#include <cassert>\nint main() { assert(add(1, 2) == 4); }",
    ]  # fmt: skip
    right, wrong = box(box.sandbox.test_program(program, tests, ROOMY, language="cpp"))
    assert (right.outcome, right.value) == (Outcome.UNCONFIRMED, None) and right.believe().passed
    assert (wrong.outcome, wrong.value) == (Outcome.ERROR, 0.0)


@pytest.mark.parametrize(
    ("row", "language"),
    [
        ({"language": "cpp"}, "cpp"), ({"lang": "C++17"}, "cpp"), ({"programming_language": "JavaScript"}, "nodejs"),
        ({"verification_info": '{"language": "rust", "test_cases": []}'}, "rust"), ({"language": "PYTHON3"}, "python"),
        ({"language": "python2"}, "python"), ({"language": "en"}, "python"), ({}, "python"),
        ({"language": "OCaml"}, "ocaml"),
    ],
)  # fmt: skip
def test_a_row_names_its_language(row: dict[str, Any], language: str) -> None:
    assert language_of(None, row) == language


@pytest.mark.parametrize(
    ("text", "language", "program"),
    [
        ("```c++\nint main() {}\n```", "cpp", "int main() {}\n"),
        ("```cpp\nint main() {}\n```\nBuild it:\n```bash\ng++ a.cpp\n```", "cpp", "int main() {}\n"),
        ("```cpp\nint main() {}\n```\nThe heart:\n```cpp\nx += 1;\n```", "cpp", "int main() {}\n"),
        ("```c#\nclass A {}\n```", "c", None), ("```python\nx = 1\n```", "cpp", None),
        ("```\nfn main() {}\n```", "rust", "fn main() {}\n"), ("fn main() {}", "rust", "fn main() {}"),
        ("I cannot.", "rust", None), ("```js\n1\n```\n```javascript\n2\n```", "nodejs", "2\n"),
    ],
)  # fmt: skip
def test_the_program_is_the_block_of_its_language(text: str, language: str, program: str | None) -> None:
    assert program_in(text, {"input", "stdin"}, language) == program


CASES = [{"type": "stdin_stdout", "input": "1 2", "output": "3"}]
PRIME = {"verification_info": {"language": "cpp", "test_cases": CASES}}
EMPTY: dict[str, list[str]] = {"input": [], "output": []}
CONTEST = {"language": "cpp", "public_tests": {"input": ["1 2"], "output": ["3"]}, "private_tests": EMPTY}


@pytest.mark.parametrize(
    ("source", "row"),
    [
        ("PrimeIntellect/verifiable-coding-problems", PRIME),
        ("code_contests_modify_code", CONTEST),
        ("code-stdio", {"lang": "c++", "inputs": ["1 2"], "outputs": ["3"]}),
    ],
)
def test_a_row_of_a_published_set_is_scored_in_its_language(source: str, row: dict[str, Any], box: Any) -> None:
    need("cpp")
    verifier = verifiers.create(source, {"cpu_seconds": 2.0}, sandbox=box.sandbox)
    reply = f"So:\n```cpp\n{PROGRAMS['c']}\n```\nIn Python:\n```python\nprint(sum(map(int, input().split())))\n```"
    assert box(verifier.verify(reply, None, row)).value == 1
    assert box(verifier.verify(reply.replace("a + b", "a - b"), None, row)).value == 0
    assert box(verifier.verify("```python\nprint(3)\n```", None, row)).value == 0
    foreign = {**row, "language": "OCaml"}
    score = box(verifier.verify("```ocaml\nlet () = print_int 3\n```", None, foreign))
    assert score.reason == "bad_row" and "language 'ocaml' is not known" in score.why


def test_rows_in_a_language_that_is_not_installed_are_reported_before_a_run() -> None:
    task = CodeStdio()
    rows = [Row(str(n), (), meta={"language": name}) for n, name in enumerate(("python", "bash", "ocaml", "ocaml"))]
    told = describe_languages(rows, task)
    assert told.startswith("2 of 4 rows: language 'ocaml' is not known") and told.endswith("their scores are missing")
    assert describe_languages(rows[:1], task) == ""


def test_the_prompt_of_a_row_names_its_language() -> None:
    asked = CodeStdio().parse(
        {"question": "Add.", "language": "c++", "ground_truth": [{"input": "1 2", "output": "3"}]}
    )
    assert "in one ```cpp code block" in asked.messages[-1].content
