"""Tab completion: verbs, recipes, keys and their values, also in the shells themselves where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patience
from upshot.cli.completion import SHELLS, complete, script_of

LINES = {
    "tra": ["train"],
    "train quicks": ["quickstart"],
    "train quickstart train.metho": ["train.method="],
    "train quickstart train.method=onl": ["train.method=online-dpo"],
    "recipe show sf": ["sft"],
    "train quickstart --dry": ["--dry-run"],
}
IN_SHELLS = ("train quicks", "train quickstart train.metho", "train quickstart train.method=onl")
"""A whole word, a word that continues after a separator, and one that bash splits; each starts a process."""
ASK = {
    # As bash calls it, which splits `key=value` into three words.
    "bash": 'source "$1"; COMP_WORDS=({words}); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _upshot; echo "${COMPREPLY[@]}"',
    # The widget's own names, so that no terminal is needed.
    "zsh": 'compdef() { }; compadd() { [[ $1 == -S ]] && shift 2; shift; (( $# )) && print -l -- "$@" }; '
    'source "$1"; words=({words}); CURRENT=$#words; _upshot',
    "fish": 'source $argv[1]; complete -C "{line}"',
}


@pytest.mark.parametrize(("line", "found"), LINES.items())
def test_the_last_word_is_completed_to_what_fits_there(line: str, found: list[str]) -> None:
    assert complete(line.split()) == found


def test_words_inside_verbs_and_options_are_completed() -> None:
    assert complete(["recipe", "sh"]) == ["show"] and "--split" in complete(["rollout", "--s"])
    assert complete(["train", "quickstart", "train.method", "=", "r"]) == ["rl"], "bash takes key=value for three words"


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shells_accept_the_script(shell: str, tmp_path: Path) -> None:
    binary = shutil.which(shell)
    if binary is None:
        pytest.skip(f"{shell} is not installed")
    script, tool = tmp_path / "script", tmp_path / "upshot"
    script.write_text(script_of(shell))
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m upshot "$@"\n')
    tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    quiet = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    for line in IN_SHELLS:
        typed = f"upshot {line}"
        words = typed.replace("=", " = ") if shell == "bash" else typed
        command = ASK[shell].replace("{words}", words).replace("{line}", typed)
        argument = [str(script)] if shell == "fish" else [shell, str(script)]
        asked = [binary, *quiet, "-c", command, *argument]
        done = subprocess.run(asked, capture_output=True, text=True, env=environment, timeout=patience(120))
        offered = [one.split("\t")[0] for one in done.stdout.split("\n") if one]
        found = LINES[line]
        expected = [one.partition("=")[2] or one for one in found] if shell == "bash" else found
        assert offered == expected, (line, done.stderr)
