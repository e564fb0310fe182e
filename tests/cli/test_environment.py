"""`.env` in the working folder, and the variable that CollabLLM itself reads from it."""

import os
from pathlib import Path

import pytest

from tests.tasks.participants.speakers import in_turn
from upshot.cli import main, variables
from upshot.tasks.users.llm import END_SIGNAL, LLMUser

FILE = """# keys
OPENAI_API_KEY=sk-1   # mine
export QUOTED="a b # c\\n"
SINGLE='x"y'
EMPTY=
no line of ours
COLLABLLM_TERMINATION_SIGNAL=[[BYE]]
"""


def test_lines_of_a_dotenv_file_are_read_as_a_shell_reads_them() -> None:
    assert dict(variables(FILE)) == {
        "OPENAI_API_KEY": "sk-1",
        "QUOTED": "a b # c\n",
        "SINGLE": 'x"y',
        "EMPTY": "",
        "COLLABLLM_TERMINATION_SIGNAL": "[[BYE]]",
    }


def test_the_users_end_signal_is_collabllms_variable_also_from_a_dotenv_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "OPENAI_API_KEY": "from the shell"})
    monkeypatch.delenv("COLLABLLM_TERMINATION_SIGNAL", raising=False)
    assert LLMUser(in_turn("")).end_signal == END_SIGNAL
    (tmp_path / ".env").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    assert main(["recipe", "list"]) == 0
    assert LLMUser(in_turn("")).end_signal == "[[BYE]]"
    assert LLMUser(in_turn(""), end_signal="[[OFF]]").end_signal == "[[OFF]]"
    assert os.environ["OPENAI_API_KEY"] == "from the shell"
