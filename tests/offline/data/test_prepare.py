"""What `data prepare` writes, drops and counts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.cli import main
from upshot.cli.files.data import run_prepare
from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.offline.data.prepare import PrepareSettings, PrepareSummary, prepare
from upshot.offline.data.select import best_and_worst, merge_duplicates
from upshot.tasks.datasets.candidates import Candidate, candidate_of, goal_groups
from upshot.tasks.datasets.splits import split_in_two
from upshot.tasks.verifiers.base import BadRow

SAMPLES = Path(__file__).parent / "samples"
MULTITURN = str(SAMPLES / "multiturn-math-hard.jsonl")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(path).to_pylist()


def prepared(
    tmp_path: Path, purpose: str, dataset: str = MULTITURN, **options: Any
) -> tuple[PrepareSummary, list, list]:
    summary = prepare(dataset, tmp_path, PrepareSettings(purpose, **{"default_system": "Be kind.", **options}))
    train, validation = (tmp_path / f"{purpose}_{split}.parquet" for split in ("train", "validation"))
    return summary, rows_of(train), rows_of(validation) if validation.exists() else []


def candidate(goal: str, conv: str, text: str = "reply", score: float | None = 1.0, opening: str = "hi") -> Candidate:
    return Candidate((Message("user", opening),), text, conv, score, goal, "")


@pytest.mark.parametrize("purpose", ["sft", "rl", "dpo"])
def test_fault_7_split_by_goal_not_by_row(tmp_path: Path, purpose: str) -> None:
    _, train, validation = prepared(tmp_path, purpose, validation=0.3, min_gap=0.0)

    def goals(rows: list[dict[str, Any]]) -> set[str]:
        if purpose == "rl":
            return {row["extra_info"]["single_turn_prompt"] for row in rows}
        return {row["conv_id"] for row in rows}

    assert train and validation
    assert not goals(train) & goals(validation)


labels = st.sampled_from("abcdef")


@given(st.lists(st.tuples(labels, labels), min_size=1, max_size=40), st.floats(0, 0.9), st.integers(0, 5))
def test_fault_7_split_by_goal_holds_for_any_rows(pairs: list[tuple[str, str]], share: float, seed: int) -> None:
    """Neither a goal nor a conversation is ever in both splits, and no candidate is lost."""
    everything = [candidate(f"Goal {goal}", f"conv {conv}") for goal, conv in pairs]
    train, validation, _ = split_in_two({"train": everything}, goal_groups, share, seed)
    assert len(train) + len(validation) == len(everything)
    assert not {c.goal for c in train} & {c.goal for c in validation}
    assert not {c.conv_id for c in train} & {c.conv_id for c in validation}


def test_spacing_and_case_do_not_make_a_different_goal() -> None:
    twins = [candidate("Solve  it", "1"), candidate("solve it\n", "2"), candidate("another", "3")]
    for seed in range(5):
        train, validation, _ = split_in_two({"train": twins}, goal_groups, 0.5, seed)
        assert {len(train), len(validation)} == {1, 2}


def test_the_split_does_not_depend_on_the_order_of_rows() -> None:
    everything = [candidate(f"g{i}", str(i)) for i in range(30)]
    _, one, _ = split_in_two({"train": everything}, goal_groups, 0.2, 3)
    _, two, _ = split_in_two({"train": everything[::-1]}, goal_groups, 0.2, 3)
    assert {c.goal for c in one} == {c.goal for c in two} and len(one) == 6


def test_sft_rows_are_the_best_whole_conversation_of_each(tmp_path: Path) -> None:
    summary, train, validation = prepared(tmp_path, "sft")
    rows = train + validation
    assert sorted(row["conv_id"] for row in rows) == ["0", "1", "2", "3"]
    for row in rows:
        roles = [m["role"] for m in row["messages"]]
        assert roles == ["system", "user", "assistant", "user", "assistant"]
        assert "works out like this" in row["messages"][-1]["content"] and row["score"] == 1.1
    assert summary.dropped["not the best of its conversation"] == 20
    assert summary.read == 24


def test_rl_rows_have_every_column_of_the_published_recipe(tmp_path: Path) -> None:
    summary, train, validation = prepared(tmp_path, "rl", source="math-hard", task_desc="maths")
    row = train[0]
    assert set(row) == {
        "prompt", "raw_prompt", "ground_truth", "reward_model", "data_source", "agent_name", "index", "extra_info",
    }  # fmt: skip
    assert row["prompt"][0] == {"role": "system", "content": "Be kind."} and row["prompt"][-1]["role"] == "user"
    assert row["raw_prompt"] == row["prompt"]
    assert row["reward_model"] == {"style": "rule", "ground_truth": row["ground_truth"]}
    interaction = row["extra_info"]["interaction_kwargs"]
    assert set(interaction) == {"name", "single_turn_prompt", "task_desc"} and interaction["task_desc"] == "maths"
    assert len(train) + len(validation) == 8  # 4 conversations × 2 histories, each once
    assert summary.dropped == {"same prompt and goal": 16}
    assert [r["index"] for r in train] == list(range(len(train)))
    assert all(json.loads(r["extra_info"]["single_turn_metadata"])["level"] == "Level 5" for r in train)


def test_latex_survives_the_round_trip(tmp_path: Path) -> None:
    _, train, validation = prepared(tmp_path, "rl")
    goals = {row["extra_info"]["single_turn_prompt"] for row in train + validation}
    assert any("$\\frac{n}{2}$" in goal for goal in goals)


def test_dpo_pairs_are_best_and_worst_with_the_minimum_gap(tmp_path: Path) -> None:
    summary, train, validation = prepared(tmp_path, "dpo", min_gap=0.5)
    pairs = train + validation
    assert all(row["score_chosen"] - row["score_rejected"] > 0.499 for row in pairs)
    assert all([m["role"] for m in row[side]] == ["assistant"] for row in pairs for side in ("chosen", "rejected"))
    # conv 3 opens with a gap of 0.4, conv 1 ends with one of 0.05; every last turn has one missing score
    assert len(pairs) == 6
    assert summary.dropped["gap below 0.5"] == 5 and summary.dropped["no score"] == 4


def test_a_missing_score_is_never_the_worst_candidate() -> None:
    tried = [candidate("g", "1", "good", 0.8), candidate("g", "1", "none", None), candidate("g", "1", "bad", -0.5)]
    (pair,) = best_and_worst(tried, Counter(), 0.1)
    assert (pair.chosen.completion, pair.rejected.completion) == ("good", "bad")


def test_repeated_replies_are_one_candidate_with_the_mean_score() -> None:
    dropped: Counter[str] = Counter()
    same = [candidate("g", "1", "yes", 1.0), candidate("g", "2", "yes ", 0.0), candidate("g", "3", "yes", None)]
    (merged,) = merge_duplicates(same, dropped)
    assert merged.score == 0.5 and dropped == {"duplicate candidate": 2}


def test_the_same_opening_of_two_goals_is_two_rl_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": [{"role": "user", "content": "help me"}], "completion": "sure", "conv_id": i,
         "single_turn_prompt": f"goal {i}", "single_turn_completion": "x", "score": 1}
        for i in range(2)
    ]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, rows)))
    summary, train, validation = prepared(tmp_path, "rl", str(file))
    assert len(train) == len(validation) == 1 and not summary.dropped


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"completion": "x"}, "no prompt and completion"),
        ({"prompt": [], "completion": "x"}, "prompt does not end with the user"),
        ({"prompt": "hi", "completion": "  "}, "empty completion"),
        (
            {"prompt": [{"role": "robot", "content": "x"}], "completion": "x"},
            "unknown role 'robot'; the roles are system",
        ),
        ({"prompt": [{"role": "user", "content": None}], "completion": "x"}, "'user' has no content"),
        ({"messages": [{"role": "user", "content": "x"}]}, "do not end with the assistant"),
    ],
)
def test_unusable_records_are_counted_with_their_reason(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        candidate_of(record)


def test_any_prompt_completion_file_becomes_sft_rows(tmp_path: Path) -> None:
    summary, train, validation = prepared(tmp_path, "sft", str(SAMPLES / "prompts.jsonl"))
    assert len(train) == 5 and len(validation) == 1 and not summary.dropped
    assert [m["role"] for m in train[0]["messages"]] == ["system", "user", "assistant"]
    assert train[0]["score"] is None


def test_a_records_own_system_message_is_kept_by_default(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    said = [{"role": r, "content": c} for r, c in (("system", "Own."), ("user", "hi"), ("assistant", "hello"))]
    file.write_text(json.dumps({"messages": said}))
    _, train, validation = prepared(tmp_path, "sft", str(file))
    assert train[0]["messages"][0]["content"] == "Own." and not validation
    _, train, _ = prepared(tmp_path, "sft", str(file), system="")
    assert train[0]["messages"][0]["role"] == "user"


def test_a_folders_own_validation_is_kept_and_its_goals_leave_train(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    lines = Path(MULTITURN).read_text().splitlines()
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "validation.jsonl").write_text("\n".join(lines[:6]))
    summary, train, validation = prepared(tmp_path, "rl", str(folder))
    assert len(validation) == 2 and len(train) == 6
    assert summary.dropped["goal also in validation"] == 6


def test_parquet_in_gives_the_same_rows_as_jsonl_in(tmp_path: Path) -> None:
    import pyarrow as pa

    records = [json.loads(line) for line in Path(MULTITURN).read_text().splitlines()]
    pyarrow.parquet.write_table(pa.Table.from_pylist(records), tmp_path / "all.parquet")
    from_jsonl = prepared(tmp_path / "a", "dpo")
    from_parquet = prepared(tmp_path / "b", "dpo", str(tmp_path / "all.parquet"))
    assert from_jsonl[1:] == from_parquet[1:]


@pytest.mark.parametrize("purpose", ["sft", "rl", "dpo"])
def test_an_empty_validation_split_is_not_written_and_an_old_one_is_removed(tmp_path: Path, purpose: str) -> None:
    prepared(tmp_path, purpose, validation=0.3, min_gap=0.0)
    assert (tmp_path / f"{purpose}_validation.parquet").exists()
    summary, train, _ = prepared(tmp_path, purpose, validation=0.0, min_gap=0.0)
    assert not (tmp_path / f"{purpose}_validation.parquet").exists()
    assert train and summary.rows["validation"] == 0 and summary.files == [str(tmp_path / f"{purpose}_train.parquet")]


@pytest.mark.parametrize("purpose", ["sft", "rl", "dpo"])
def test_a_small_file_has_the_same_types_as_a_large_one(tmp_path: Path, purpose: str) -> None:
    prepared(tmp_path, purpose, validation=1, min_gap=0.0)
    tables = [pyarrow.parquet.read_table(tmp_path / f"{purpose}_{split}.parquet") for split in ("train", "validation")]
    assert tables[0].schema == tables[1].schema


def test_validation_may_be_a_number_of_goals(tmp_path: Path) -> None:
    summary, _, _ = prepared(tmp_path, "rl", validation=2)
    assert summary.goals == {"train": 2, "validation": 2}
    with pytest.raises(UserError, match="4 goals cannot be held out of 4"):
        prepared(tmp_path, "rl", validation=4)
    with pytest.raises(UserError, match=r"validation is 1\.5"):
        prepared(tmp_path, "rl", validation=1.5)


def test_the_task_may_be_described_in_free_text(tmp_path: Path) -> None:
    words = ["--dataset", MULTITURN, "--for", "rl", "--out", str(tmp_path), "--task-desc", "solving math problems"]
    assert main(["data", "prepare", *words]) == 0
    (told,) = {row["extra_info"]["interaction_kwargs"]["task_desc"] for row in rows_of(tmp_path / "rl_train.parquet")}
    assert told == "solving math problems"


def test_rl_rows_keep_the_reply_they_came_from(tmp_path: Path) -> None:
    _, train, validation = prepared(tmp_path, "rl")
    for row in train + validation:
        extra = row["extra_info"]
        assert extra["prompt"] == row["prompt"] and extra["completion"]
        assert extra["sessions"][0][0] == {"role": "user", "content": "ok thanks"}
        assert set(extra["rewards"]) == {"accuracy", "interactivity", "token_amount"}
    assert any(row["extra_info"]["score"] is not None for row in train)


def test_rows_can_be_filtered_by_any_metric(tmp_path: Path) -> None:
    words = ["data", "prepare", "--dataset", MULTITURN, "--out", str(tmp_path), "--validation", "0", "--json"]
    everything = read_all(MULTITURN)
    wrong = {
        (row["prompt"][-1]["content"], row["completion"]) for row in everything if row["rewards"]["accuracy"] == [0.0]
    }
    for purpose in ("sft", "dpo"):
        assert main([*words, "--for", purpose, "--min", "rewards.accuracy=0.5", "--min-gap", "0"]) == 0
        rows = rows_of(tmp_path / f"{purpose}_train.parquet")
        said = [row["messages"] if purpose == "sft" else row["prompt"] + row["chosen"] for row in rows]
        kept = {(messages[-2]["content"], messages[-1]["content"]) for messages in said}
        assert kept and wrong and not kept & wrong
    assert main([*words, "--for", "sft", "--min", "acuracy=1"]) == 2
    assert main([*words, "--for", "rl", "--min", "accuracy=1"]) == 2
    with pytest.raises(UserError, match=r"no metric 'acuracy' .*did you mean 'accuracy'"):
        prepared(tmp_path, "sft", least={"acuracy": 1.0})


def read_all(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_nothing_usable_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no row for rl .*no hidden goal: 6"):
        prepare(str(SAMPLES / "prompts.jsonl"), tmp_path, PrepareSettings("rl"))


def test_nothing_left_to_train_on_is_an_error_even_if_something_is_held_out(tmp_path: Path) -> None:
    def write(right: str) -> str:
        """Eight goals, each with one reply that is the goal's name; only one of them is right."""
        goals = [f"goal {number}" for number in range(8)]
        facts = {"prompt": [{"role": "user", "content": "hi"}], "score": 1.0, "single_turn_completion": "1"}
        rows = [
            facts
            | {"single_turn_prompt": g, "conv_id": g, "completion": g, "rewards": {"accuracy": [float(g == right)]}}
            for g in goals
        ]
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        return str(tmp_path / "rows.json")

    prepare(write(""), tmp_path, PrepareSettings("sft", validation=1))
    [held_out] = rows_of(tmp_path / "sft_validation.parquet")
    file = write(held_out["messages"][-1]["content"])
    with pytest.raises(UserError, match=r"no row for sft .* left for training.*accuracy below 1: 7"):
        prepare(file, tmp_path, PrepareSettings("sft", validation=1, least={"accuracy": 1.0}))


def test_broken_json_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": ')
    with pytest.raises(UserError, match=r"broken.jsonl, line 2 is not JSON"):
        prepare(str(file), tmp_path, PrepareSettings("sft"))


def test_a_hub_name_without_a_network_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(name: str) -> None:
        raise ConnectionError(f"Couldn't reach '{name}' on the Hub\nand more lines")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match="cannot load 'collabllm/collabllm-multiturn-math-hard'") as caught:
        prepare("collabllm/collabllm-multiturn-math-hard", tmp_path, PrepareSettings("rl"))
    assert "\n" not in str(caught.value)


def test_the_command_prints_its_summary_as_json_and_as_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from upshot.cli import make_parser

    parser = make_parser(["data"])
    command = ["data", "prepare", "--dataset", MULTITURN, "--for", "rl", "--out", str(tmp_path)]
    assert run_prepare(parser.parse_args([*command, "--json"])) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"] == {"train": 6, "validation": 2} and printed["dropped"] == {"same prompt and goal": 16}
    assert rows_of(tmp_path / "rl_train.parquet")[0]["data_source"] == "math-hard"
    assert run_prepare(parser.parse_args(command)) == 0
    assert "dropped: same prompt and goal" in capsys.readouterr().out


def test_goals_alone_are_rows_for_rl(tmp_path: Path) -> None:
    """The simulated user writes their openings; there is nothing in them to imitate."""
    from upshot.core.errors import UserError
    from upshot.tasks.base import tasks

    file = tmp_path / "goals.jsonl"
    file.write_text("".join(f'{{"goal": "Plan trip {n}", "reference": "plan {n}"}}\n' for n in range(6)))
    prepare(str(file), tmp_path / "out", PrepareSettings("rl", source="collabllm"))
    task = tasks.create("collabllm", {"train_file": str(tmp_path / "out" / "rl_train.parquet")})
    rows = task.rows("train")
    assert len(rows) == 5 and all(row.goal.startswith("Plan trip") for row in rows)
    assert not any(message.role == "user" for row in rows for message in row.messages)
    with pytest.raises(UserError, match="no row for sft"):
        prepare(str(file), tmp_path / "sft", PrepareSettings("sft"))


def scored(prompt: str, completion: str, score: float | None) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "score": score}


def written(folder: Path, *rows: dict[str, Any]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def test_without_a_conv_id_the_best_reply_to_each_history_is_imitated(tmp_path: Path) -> None:
    rows = [scored("hi", "bad", 0.0), scored("hi", "good", 1.0), scored("bye", "only", 0.0)]
    summary, train, _ = prepared(tmp_path, "sft", written(tmp_path, *rows), validation=0)
    assert [row["messages"][-1]["content"] for row in train] == ["good", "only"]
    assert summary.dropped == {"not the best of its conversation": 1}


def test_without_scores_every_reply_to_a_prompt_is_imitated(tmp_path: Path) -> None:
    rows = [scored("hi", "one", None), scored("hi", "two", None)]
    _, train, _ = prepared(tmp_path, "sft", written(tmp_path, *rows), validation=0)
    assert [row["messages"][-1]["content"] for row in train] == ["one", "two"]


@pytest.mark.parametrize("seed", range(4))
def test_replies_without_a_score_are_dropped_whichever_split_has_the_scored_ones(seed: int, tmp_path: Path) -> None:
    rows = [scored(f"p{n}", "x", 0.5 if n < 4 else None) for n in range(12)]
    summary, train, validation = prepared(tmp_path, "sft", written(tmp_path, *rows), validation=0.4, seed=seed)
    assert len(train) + len(validation) == 4 and summary.dropped["no score at the last turn"] == 8


def test_a_single_goal_cannot_be_split(tmp_path: Path) -> None:
    file = written(tmp_path, scored("hi", "one", 1.0))
    with pytest.raises(
        UserError,
        match="5 goals cannot be held out of 1; hold out fewer, or a share below 1",
    ):
        prepared(tmp_path, "sft", file, validation=5)


def test_a_refused_preparation_leaves_no_folder_behind(tmp_path: Path) -> None:
    file = written(tmp_path, {"question": "?"})
    with pytest.raises(UserError, match="no row for sft"):
        prepare(file, tmp_path / "new" / "out", PrepareSettings("sft"))
    assert not (tmp_path / "new").exists()
