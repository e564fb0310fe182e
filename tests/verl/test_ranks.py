"""Methods that need no Ray with --engine verl: local mode on equally many ranks, by torchrun."""

from __future__ import annotations

import pytest

from upshot.cli import main
from upshot.core.errors import UserError
from upshot.verl.ranks import torchrun_command

WORDS = ["quickstart", "train.method=sft", "warm_start=null"]


def test_it_starts_torchrun_with_local_modes_arguments() -> None:
    command = torchrun_command(WORDS, ["trainer.n_gpus_per_node=4", "trainer.nnodes=1"])
    assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    assert command[6:] == ["-m", "upshot.cli", "train", *WORDS]


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ("trainer.nnodes=2", "start torchrun on each"),
        ("optim.lr=1", "optim.lr belongs to verl"),
        ("data.seed=1", "data.seed"),
    ],
)
def test_verl_keys_without_effect_are_refused_by_name(theirs: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        torchrun_command(WORDS, [theirs])


def test_the_dry_run_shows_the_command_and_makes_local_modes_checks(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "train.steps=2", "trainer.n_gpus_per_node=2"]
    assert main(["train", *words, "--engine", "verl", "--dry-run", "--offline"]) == 0
    assert "--nproc-per-node 2 -m upshot.cli train quickstart" in capsys.readouterr().out
