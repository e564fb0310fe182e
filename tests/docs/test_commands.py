"""Every command in the documents is run by a test, or marked as needing a GPU, a key or the hub.

A mark is `(GPU)`, `(key)`, `(hub)` or several of them in the command's comment, or `<!-- commands: GPU -->` on its own
line, which applies to the rest of the page.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import DOCS, PAGES, ROOT
from upshot.cli import VERBS, main, make_parser
from upshot.config.load import load_recipe

NEEDS = re.compile(r"\((?:(?:GPU|key|hub)(?:, )?)+\)")
PAGE_NEEDS = re.compile(r"<!-- commands: (GPU|key|hub)[^>]*-->")
PROGRAMS = ("upshot", "make", "python", "pip", "source", "git", "curl")

TINY = "model.tiny={hidden: 16, layers: 1, heads: 2, mlp: 32}"
STEP = (TINY, "train.steps=1", "train.prompts_per_step=2", "run_dir=run", "reward.max_missing=1", "--quiet")
SMALL = ("train.group_size=2", "warm_start.steps=1", "warm_start.batch=4", *STEP)
OWN = ("task.size=16", *SMALL)

RUN_HERE: dict[str, tuple[str, ...]] = {
    "make demo": ("task.rows_per_split=16", "futures.samples=2", *SMALL[:-2]),
    "upshot demo tree": ("task.rows_per_split=16", *SMALL[:-2]),
    "upshot train quickstart credit.by=reply": ("task.rows_per_split=16", *SMALL),
    "upshot train quickstart credit.by=tree": ("task.rows_per_split=16", *SMALL),
    "upshot train quickstart seed=1 eval.every=20 eval.rows=200 train.advantage=grpo": (
        "task.rows_per_split=16",
        *SMALL,
    ),
    "upshot recipe list": (),
    "upshot recipe show collabllm-grpo train.lr=1e-5": (),
    "upshot recipe show quickstart": (),
    "upshot new task my_task": (),
    "upshot new task kiosk": (),
    "upshot new estimator median": (),
    "upshot train shop": ("task.rows_per_split=16", "eval.rows=2", *SMALL),
    "upshot train gsm8k-multiturn seed=1 eval.every=30 eval.rows=200 train.advantage=grpo": (
        "task.limit=32",
        "eval.rows=2",
        *SMALL,
    ),
    "upshot train shop seed=1 eval.every=10 train.advantage=grpo": ("task.rows_per_split=16", "eval.rows=2", *SMALL),
    "upshot train monitor-mini": ("task.limit=32", "eval.rows=2", *SMALL),
    "upshot data prepare --dataset chats.jsonl --for user --out data/user": (),
    "upshot train gsm8k-multiturn": ("task.limit=32", *SMALL),
    "upshot train classmate-mini-peer": ("task.limit=32", *STEP),
    "upshot train kiosk.yaml --dry-run --trust": (),
    "upshot train kiosk.yaml": ("eval.every=0", *OWN),
    "upshot train examples/collabllm.yaml": OWN,
    "upshot train examples/task.yaml": OWN,
    "upshot train examples/agent.yaml": ("task.rows_per_split=16", *SMALL),
    "upshot train examples/environment.yaml": ("task.episodes=16", "train.group_size=2", *STEP),
    "upshot train examples/stock.yaml": ("task.size=16", f"task.server={sys.executable} examples/stock.py", *SMALL),
    "upshot train examples/classmate.yaml": ("task.size=16", *STEP),
    "upshot verify answers.jsonl --task gsm8k": (),
    "upshot verify answers.jsonl --task gsm8k --mode flexible --out scored.jsonl": (),
    "upshot data prepare --dataset tests/offline/data/samples/multiturn-math-hard.jsonl --for dpo --out data/": (),
    "upshot data prepare --for rl --task gsm8k --dataset gsm8k/train.jsonl --out data/gsm8k": (),
}
"""Commands that this test runs, with the overrides that make them fast."""
SAME_AS = {"make demo": "upshot demo"}

RESUMES = "tests/config/test_own_code.py::test_code_beside_the_recipe_is_found_and_found_again_by_resume"
SANDBOX = "tests/sandbox/test_server.py::test_the_three_examples_of_the_classmate_readme_work"
TABLE = "tests/offline/test_table.py::test_the_paper_table_has_task_metric_k_tokens_and_interactivity"
VERL = "tests/verl/test_config.py::test_a_dry_run_on_verl_prints_both_sides_and_what_has_no_counterpart"
REAL = "tests/verl/real"
LOOPS = "tests/test_examples.py::test_the_whole_loop_runs_inline"
CLASSMATES = "tests/test_examples.py::test_the_classmate_and_its_twin_run"
VIEW = "tests/run/report/test_server.py::test_the_verb_serves_until_it_is_stopped"
COMPARE = "tests/run/report/test_browser.py::test_runs_are_compared_by_results_keys_bands_and_the_same_goal"
RUNS = "tests/cli/test_runs.py::test_only_runs_are_removed_or_moved"
MINI = "tests/offline/test_classmates.py::test_one_step_with_a_classmate_credits_the_thought_with_both_parts"
USER = "tests/offline/test_user.py::test_a_lifelike_user_is_indistinguishable_and_an_assistant_in_disguise_is_not"
BASELINES = "tests/offline/test_monitor.py::test_baselines_show_what_the_thought_adds_with_intervals"
MONITOR = "tests/offline/test_monitor.py::test_the_numbers_of_a_run_are_grouped_by_step_and_task"
BUILD = "tests/offline/data/test_build.py::test_rows_and_conversations_have_the_published_format"
IMPORT = "tests/offline/migrate/test_import.py::test_the_files_that_a_script_names_are_read_beside_it"
REPLAY = "tests/offline/test_replay.py::test_a_changed_reward_is_shown_beside_the_old_one"
EXPORT = "tests/run/test_export.py::test_an_export_loads_anywhere_in_its_own_type_without_files_of_the_run"
IMPORT_CLASSMATES = "tests/offline/migrate/test_import.py::test_a_map_of_classmates_is_used_unchanged"
IMPORT_BUILD = "tests/offline/migrate/test_import.py::test_a_script_that_builds_data_becomes_the_line_that_builds_it"
PLAY = "tests/offline/play/test_rollout_verb.py"
TRIAL = "tests/run/test_trial.py::test_the_plain_recipes_accept_a_users_own_file"
PASTED = "tests/docs/test_pasted.py::test_recipes_for_the_users_own_files_train"
PLAIN = "tests/docs/test_pasted.py::test_the_plain_recipes_train_on_a_jsonl"
LOGS = "tests/docs/test_logs.py::test_every_command_of_the_tutorial_runs_in_its_order"
ELSEWHERE = {
    **dict.fromkeys(
        (
            "upshot logs look",
            "upshot logs prepare",
            "python examples/shop_logs.py",
            "upshot eval shop",
            "upshot train kto",
        ),
        LOGS,
    ),
    **dict.fromkeys(("upshot train shop train.steps=0", "upshot train data/shop", "upshot eval data/shop"), LOGS),
    "upshot reproduce": "tests/offline/test_reproduce.py::test_every_other_table_runs_from_its_first_stage_to_its_last",
    "upshot rollout quickstart": f"{PLAY}::test_a_rollout_prints_trees_with_rewards_and_trains_nothing",
    "upshot chat runs/…": "tests/offline/play/test_chat.py::test_a_chat_in_a_terminal",
    "upshot eval examples/task.yaml": f"{PLAY}::test_any_task_has_a_held_out_table_with_intervals_that_resumes",
    "upshot sweep quickstart": f"{PLAY}::test_a_sweep_trains_every_combination_once_and_reports_mean_and_interval",
    "upshot recipe diff": f"{PLAY}::test_recipes_are_compared_by_the_keys_that_differ",
    "upshot train sft train.data=talks.jsonl --dry-run": TRIAL,
    "upshot train grpo task.file=qa.jsonl --dry-run": TRIAL,
    "upshot train sft train.data=talks.jsonl": PLAIN,
    "upshot train dpo train.data=pairs.jsonl": PLAIN,
    "upshot train grpo task.file=qa.jsonl": PLAIN,
    "make setup": "Makefile::setup",
    "pip install -e '.[hub]'": "tests/test_extras.py::test_pip_resolves",
    "upshot view runs/": VIEW,
    "upshot train polite.yaml": PASTED,
    "upshot train questions.yaml": PASTED,
    "upshot train goals.yaml": PASTED,
    "make test": "Makefile::test",
    "make test-full": "Makefile::test-full",
    "upshot train quickstart --engine verl --dry-run": VERL,
    "pip install -e '.[verl]' vllm": "Makefile::test-cluster",
    "python -m tests.support.verl_cpu quickstart": f"{REAL}/test_quickstart.py::test_every_step_has",
    "python -m tests.support.verl_cpu reproduce": f"{REAL}/test_reproduce.py::test_a_stage_is_trained_on_verl",
    "upshot train --engine verl --resume": f"{REAL}/test_quickstart.py::test_a_resumed_run_goes_on_with_the_next_rows",
    "source .venv/bin/activate": "Makefile::setup",
    "git clone … && cd upshot": "Makefile::setup",
    "upshot demo seed=0": "tests/docs/test_commands.py::test_commands_of_the_pages_run",  # like `make demo`
    "upshot demo classmates": "tests/offline/test_classmates.py::test_the_demo_prints_a_row_for_each_model",
    "upshot train classmate-mini": MINI,
    "upshot train recipes/gsm8k-multiturn.yaml": "tests/docs/test_commands.py::test_commands_of_the_pages_run",
    "upshot train --resume runs/…": RESUMES,
    "upshot train examples/classmates.yaml": CLASSMATES,
    "upshot train examples/reverse.yaml": "tests/peers/test_verifiers.py::test_the_example_trains",
    "upshot eval --task math-hard --file": TABLE,
    "upshot eval monitor runs/my-run": MONITOR,
    "upshot eval monitor replies.jsonl --judge SPEC --baselines": BASELINES,
    "upshot eval user chats.jsonl": USER,
    "upshot train porter.yaml": "tests/docs/test_users.py::test_the_whole_file_trains_as_pasted",
    "upshot eval monitor replies.jsonl": "tests/offline/test_monitor.py::test_a_file_with_scores_is_monitored",
    "upshot data prepare --dataset SOURCE": "tests/docs/test_commands.py::test_commands_of_the_pages_run",
    "upshot data prepare --dataset …": "tests/docs/test_commands.py::test_commands_of_the_pages_run",
    "upshot data build --task math-hard --policy SPEC": BUILD,
    "upshot recipe import train_rl_collabllm.sh": IMPORT,
    "upshot recipe import build.sh": IMPORT_BUILD,
    "upshot recipe import qwen3_classmate.sh": IMPORT_CLASSMATES,
    "upshot train mine.yaml --dry-run": "tests/cli/test_new.py::test_what_is_written_passes_its_own_tests",
    "upshot export runs/…": EXPORT,
    "upshot view runs/… --out": "tests/run/report/test_report.py::test_the_verb_writes_the_page_and_prints_its_path",
    "upshot view A B": COMPARE,
    "upshot view": VIEW,
    "upshot runs": RUNS,
    "upshot replay runs/…": REPLAY,
    "upshot sandbox": SANDBOX,
    "curl -s localhost:8001": SANDBOX,
    "upshot pool plan": "tests/serving/swap/test_run.py::test_pool_plan_prints_every_model_with_its_place_or_refuses",
    "upshot serve servers.yaml": "tests/serving/servers/test_watch.py::test_the_map_names_the_servers_as_classmates",
    "upshot serve status": "tests/serving/servers/test_watch.py::test_status_shows_the_servers_and_stop_ends_them",
    "upshot serve stop": "tests/serving/servers/test_watch.py::test_status_shows_the_servers_and_stop_ends_them",
    "upshot serve": "tests/serving/openai/test_server.py::test_openai_client_chats_with_n_seed_and_logprobs",
    "python -m pytest test_kiosk.py": "tests/cli/test_new.py::test_what_is_written_passes_its_own_tests",
    "python examples/collabllm_loop.py": LOOPS,
    "python examples/task_loop.py": LOOPS,
    "python examples/classmates_loop.py": LOOPS,
}
"""Prefixes of commands that other tests run: a test function, or a Makefile target (CI runs `make test`)."""


@dataclass(frozen=True)
class Command:
    """A command of a page."""

    page: str
    line: int
    text: str
    marked: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def commands() -> Iterator[Command]:
    """Every command in a code block of the pages."""
    for page in PAGES:
        marked, fenced, lines = False, "", page.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            marked = marked or bool(PAGE_NEEDS.search(line))
            if line.startswith("```"):
                fenced = "" if fenced else line.removeprefix("```") or "text"
            shown = (
                line
                if fenced in ("bash", "sh", "console")
                else line[4:]
                if line.startswith("    ") and not fenced
                else ""
            )
            shown = shown.removeprefix("$ ")
            if shown.split(" ")[0] not in PROGRAMS:
                continue
            while shown.endswith("\\"):
                shown = f"{shown[:-1].rstrip()} {lines[number].strip()}"
                number += 1
            text, _, comment = shown.partition("  #")
            own = bool(NEEDS.search(comment))
            yield Command(page.name, number, text.strip(), marked or own)


FOUND = list(commands())


def test_there_are_commands_to_check() -> None:
    assert len(FOUND) > 40


@pytest.mark.parametrize("command", FOUND, ids=str)
def test_every_command_is_run_by_a_test_or_marked(command: Command) -> None:
    known = command.text in RUN_HERE or command.text.startswith(tuple(ELSEWHERE))
    assert known or command.marked, (
        f"{command} is run by no test: add it to RUN_HERE or ELSEWHERE, or mark it in its comment: (GPU), (key), (hub)"
    )


@pytest.mark.parametrize("command", [c for c in FOUND if c.text.startswith("upshot ")], ids=str)
def test_every_upshot_command_has_verbs_and_options_that_exist(command: Command) -> None:
    words = shlex.split(command.text)[1:]
    assert words[0] in VERBS
    if words[:2] in (["eval", "judge"], ["eval", "monitor"], ["eval", "user"]):
        from upshot.cli.eval import inner_parser

        inner_parser(words[1]).parse_args(words[2:])
        return
    stands_for = [word.replace("sft|rl|dpo", "rl") for word in words]
    _, rest = make_parser(words[:1]).parse_known_args(stands_for)
    assert [word for word in rest if word.startswith("-")] == []


MARKED_TRAININGS = sorted(
    {c.text for c in FOUND if c.marked and re.match(r"upshot train (?!--|RECIPE|sft|dpo|grpo)", c.text)}
)
HELPER = re.compile(r"(models\.\w+)=(?:…|[A-Z]+|runs/.*)$")
CANNOT_BE_PLANNED = {
    "upshot train classmate-gsm8k": "no file 'data/gsm8k/rl_train.parquet'",
    "upshot train collabllm-sft": "no file 'data/math-hard/sft_train.parquet'",
    "upshot train collabllm-grpo": "no file 'data/math-hard/rl_train.parquet'",
    "upshot train user-sft": "no file 'data/user/user_train.parquet'",
    **({} if find_spec("reasoning_gym") else {"upshot train reasoning-gym": "needs the library"}),
    **({} if find_spec("verl") else {"--engine verl": "--engine verl needs verl"}),
}
"""A part of a command for a GPU, and what its dry run reports as missing here: rows from a hub, or a library."""


def with_stand_ins(command: str, model: Path) -> list[str]:
    """A command with few rows and with local stand-ins (a tiny model, helpers that repeat) for its models."""
    words = [
        HELPER.sub(r"\1=scripted:echo", word).replace("…/vllm", sys.executable) for word in shlex.split(command)[1:]
    ]
    named = any(word.startswith("model.path=") for word in words) or load_recipe(words[1], []).recipe.model.path
    words = [word for word in words if not word.startswith("model.path=") and word != "--dry-run"]
    few = ["task.rows_per_split=64"] if words[1].startswith("withheld") else []
    return [*words, *few, *([f"model.path={model}"] if named else [])]


@pytest.fixture(scope="module")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest possible model in Hugging Face's format."""
    from upshot.config.recipe import TinyConfig
    from upshot.models.tiny import tiny_model, tiny_tokenizer

    place = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_tokenizer(["the", "answer", "is", "####", *map(str, range(10))])
    tiny_model(TinyConfig(hidden=16, layers=1, heads=2, mlp=32, context=4096), tokenizer, 0).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.mark.parametrize("command", MARKED_TRAININGS)
def test_a_training_for_a_gpu_can_be_planned_without_it(
    command: str, tiny_model_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = with_stand_ins(command, tiny_model_folder)
    status = main([*words, "--dry-run"])
    shown = capsys.readouterr()
    reason = next((why for part, why in CANNOT_BE_PLANNED.items() if part in command), None)
    if reason is None:
        assert status == 0 and "policy " in shown.out, shown.err
    else:
        assert status == 2 and reason in shown.err


def test_every_listed_command_is_on_a_page() -> None:
    said = [command.text for command in FOUND]
    assert set(RUN_HERE) - set(said) == set()
    assert [start for start in ELSEWHERE if not any(text.startswith(start) for text in said)] == []


@pytest.mark.parametrize("where", sorted(set(ELSEWHERE.values())))
def test_the_tests_that_run_the_other_commands_exist(where: str) -> None:
    file, _, name = where.partition("::")
    text = (ROOT / file).read_text()
    if file == "Makefile":
        assert re.search(rf"^{name}:", text, re.MULTILINE)
    else:
        names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        assert any(found.startswith(name) for found in names), f"{file} has no test '{name}'"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder with the files that the pages mention."""
    (tmp_path / "answers.jsonl").write_text('{"response": "#### 4", "ground_truth": "4"}\n')
    said = '{"role": "user", "content": "hi %d"}, {"role": "assistant", "content": "yes?"}'
    (tmp_path / "chats.jsonl").write_text("".join(f'{{"messages": [{said % n}]}}\n' for n in range(12)))
    (tmp_path / "gsm8k").mkdir()
    rows = "".join(f'{{"question": "{n} + 1?", "answer": "#### {n + 1}"}}\n' for n in range(12))
    (tmp_path / "gsm8k" / "train.jsonl").write_text(rows)
    for name in ("tests", "examples", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "rewards.py").write_text(readme_metric())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in OWN_MODULES:
            sys.modules.pop(name)


OWN_MODULES = ("kiosk", "rewards", *(path.stem for path in (ROOT / "examples").glob("*.py")))


def python_blocks(page: Path) -> list[str]:
    """The Python of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def readme_code() -> str:
    """The README's code, as pasted."""
    return next(block for block in python_blocks(ROOT / "README.md") if "def polite" in block)


def readme_metric() -> str:
    """Only its metric."""
    return readme_code().partition("run = ")[0]


@pytest.mark.parametrize("command", sorted(RUN_HERE))
def test_commands_of_the_pages_run(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upshot.offline.demo.quickstart.ROWS", 8)
    monkeypatch.setattr("upshot.offline.demo.workers.cores", lambda: 1)  # in this process
    if "kiosk.yaml" in command:
        assert main(["new", "task", "kiosk"]) == 0
    words = shlex.split(SAME_AS.get(command, command))[1:]
    assert main([*words, *RUN_HERE[command]]) == 0
    assert capsys.readouterr().out


def test_the_readmes_metric_works_as_pasted_in_a_recipe(folder: Path) -> None:
    words = ("reward.metrics=[verifier, rewards:polite]", "task.rows_per_split=16", *SMALL)
    assert main(["train", "quickstart", *words]) == 0


def test_the_readmes_code_runs_as_pasted(folder: Path) -> None:
    small = ["train", "quickstart", "task.rows_per_split=16", *SMALL[:-3]]
    assert main(["recipe", "show", *small[1:]]) == 0
    overrides = {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in small[2:])}
    code = readme_code().replace('"quickstart", ', '"quickstart", **small, ')
    space: dict[str, Any] = {"small": overrides}
    exec(compile(code, "README.md", "exec"), space)
    assert space["run"].status["state"] == "finished" and any("polite" in key for key in space["run"].metrics[-1])


def test_the_readmes_metric_works_as_pasted_in_a_call() -> None:
    import upshot

    space: dict[str, object] = {}
    exec(readme_metric(), space)
    opening = [{"role": "user", "content": "Can you help me?"}]
    kind, rude = upshot.reward(opening, ["Tell me more please.", "No."], rounds=0, metrics={space["polite"]: 1.0})
    assert (kind.reward.total.value, rude.reward.total.value) == (1.0, 0.0)


def test_the_call_of_reward_names_arguments_that_exist() -> None:
    from upshot.api.settings import RewardOptions

    tree = ast.parse(next(block for block in python_blocks(DOCS / "collabllm.md") if "upshot.reward(" in block))
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and "upshot.reward" in ast.unparse(node.func)
    ]
    assert calls and {keyword.arg for keyword in calls[0].keywords} <= set(RewardOptions.__annotations__)
