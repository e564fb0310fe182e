"""The files of a step are enough to read it and to score it again, without the policy."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rollout.test_classmates import ROWS, Recites, context, play
from tests.training.workshop import recipe
from upshot.cli import main
from upshot.core.conversation import Conversation, Message, Row, Sample
from upshot.core.errors import UserError
from upshot.core.files import dump_json_line
from upshot.offline.replay import compare, lines_of, read_reply, score_again
from upshot.rollout.reply import Rollout
from upshot.run import samples
from upshot.run.folder import RunFolder
from upshot.run.run import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    path = tmp_path_factory.mktemp("replay") / "run"
    train(recipe(path, steps=2, warm=False))
    return path


def lines(run: Path, step: int) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    return [line for line in found if line["step"] == step]


def replayed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["replay", *words, "--json"]) in (0, 1)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_saved_reply_includes_its_goal_and_reference(run: Path) -> None:
    for line in lines(run, 1):
        assert line["goal"] and line["reference"] is not None and line["groups"]


def test_ids_and_log_probabilities_of_replies_are_kept_exactly(run: Path) -> None:
    kept = RunFolder(run).samples(2)
    written = lines(run, 2)
    assert list(kept) == [line["key"] for line in written]
    for line in written:
        (sample,) = kept[line["key"]]
        (said,) = [message for message in line["messages"] if message["trained"]]
        assert len(sample.ids) == len(sample.logprobs) == said["tokens"] and sample.finish == said["finish"]
        assert all(value <= 0 for value in sample.logprobs)
        assert line["credit"][0]["stop"] <= len(sample.context) + len(sample.ids)


def test_samples_survive_being_packed() -> None:
    rng = np.random.default_rng(0)

    def sample(size: int, thought: tuple[int, int] | None) -> Sample:
        logprobs = tuple(float(value) for value in -rng.random(size).astype(np.float32))
        ids = tuple(int(token) for token in rng.integers(0, 150_000, size))
        return Sample((1, 2, 3), ids, logprobs, "length", 7, thought, 2 if thought else 0)

    replies = []
    for number, turns in enumerate(([sample(5, (1, 2)), sample(3, None)], [], [sample(1, None)])):
        conversation = Conversation(Row(f"r{number}", (Message("user", "?"),)))
        for turn in turns:
            conversation.say(Message("assistant", "x"), turn)
        replies.append(Rollout(conversation))
    kept = samples.unpack(samples.pack(replies))
    assert kept == {f"r{n}": list(reply.conversation.samples()) for n, reply in enumerate(replies)}


def test_a_replay_gives_the_scores_of_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = replayed(capsys, str(run), "1")
    assert {one["what"] for one in found} == {"reward", "verifier", "token_amount"} and len(found) == 12 * 3
    assert all(one["same"] for one in found), [one for one in found if not one["same"]]


def test_a_changed_reward_is_shown_beside_the_old_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = "reward.metrics=[{name: token_amount, weight: -1}]"
    found = replayed(capsys, str(run), "2", changed)
    before = {line["key"]: line["reward"] for line in lines(run, 2)}
    for one in found:
        old = before[one["key"]]
        assert one["old"] == (old["total"] if one["what"] == "reward" else old["means"][one["what"]])
        if one["what"] == "reward":
            assert one["new"]["value"] == -old["means"]["token_amount"]["value"]
    assert main(["replay", str(run), "2", changed, "--changed"]) == 1
    table = capsys.readouterr().out
    assert "12 replies, 24 numbers: 12 differ" in table and "changed" in table


def test_a_step_that_was_not_kept_is_named(run: Path) -> None:
    with pytest.raises(UserError, match="has no replies of step 9; it has steps 1 to 2"):
        lines_of(RunFolder(run), 9)


def test_rewinding_removes_later_samples(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.write_samples(step, [])
    folder.rewind(["rl"], "rl", 2)
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["000001.npz", "000002.npz"]


def test_classmates_answers_are_scored_again() -> None:
    peer = Recites("peer", lambda text, seed: "1" if seed % 2 else "no")
    made, _ = context(lambda text, seed: f"<think>so it is 1</think>{1 + seed % 2}", {"peer": peer}, samples=4)
    replies = [reply for group in play(made, group_size=6) for reply in group]
    kept = samples.unpack(samples.pack(replies))
    asked = len(peer.asked)
    for reply in replies:
        line = json.loads(dump_json_line(reply.to_dict(1)))
        again = read_reply(line, {row.id: row for row in ROWS}, kept[line["key"]])
        asyncio.run(score_again(made, again))
        assert [one for one in compare(line, again) if not one.same] == []
        assert again.credit == reply.credit and again.credit is not None
        assert [future.scores["classmate"].value for future in again.futures if future.cut] == [
            future.scores["classmate"].value for future in reply.futures if future.cut
        ]
    assert len(peer.asked) == asked, "nobody is asked to continue anything"
