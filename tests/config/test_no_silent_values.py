"""No value of a recipe is silently wrong: values that are out of bounds, unused or contradictory are refused early."""

from __future__ import annotations

import copy
import logging
import re
import runpy
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.option_types import option_types
from upshot.config.bools import is_misplaced_bool
from upshot.config.load import load_recipe
from upshot.config.method import method_of, methods
from upshot.config.recipe import TrainConfig
from upshot.config.registry import Registry, check_options
from upshot.config.sampling import Sampling
from upshot.core.errors import UserError
from upshot.models.tool_calls.base import parsers
from upshot.rewards.advantages.grouped import estimators
from upshot.rewards.metric import metrics
from upshot.rewards.workers.base import managers
from upshot.rollout.check_names import check_names
from upshot.rollout.dependencies import FUTURE_NAMES
from upshot.rollout.futures.talk import kinds
from upshot.run.checks import find, refuse
from upshot.run.forecast import plan
from upshot.tasks.base import tasks
from upshot.tasks.datasets import files
from upshot.tasks.participants.base import users
from upshot.tasks.verifiers.base import verifiers
from upshot.tasks.withheld import WithheldTask
from upshot.training.objectives.objectives import surrogates

KINDS: list[Registry[Any]] = [tasks, metrics, users, managers, kinds, estimators, surrogates, verifiers, parsers]
ELSEWHERE = {("talk", "samples"), ("talk", "rounds"), ("judged", "low"), ("judged", "high")}
ELSEWHERE |= {("classmates", "weight"), ("classmates", "right_from")}
"""Numbers without bounds of their own: bounded by `futures`, checked as a range, or any value is valid."""


def refused(recipe: str, *overrides: str) -> str:
    """The error when the recipe is loaded and its names are checked."""
    with pytest.raises(UserError) as said:
        check_names(load_recipe(recipe, list(overrides)).recipe)
    return str(said.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.metrics=[]", "reward.metrics is empty: every reply would be worth 0"),
        ("reward.metrics=[{name: verifier, weight: 0}]", "all weights in reward.metrics are 0"),
        ("train.optimizer.betas=[1.5,2]", "train.optimizer.betas.0 = 1.5: input should be less than 1"),
        ("model.tiny.heads=3", "model.tiny.hidden is 128, which 3 heads cannot share in pairs"),
        (f"model.tiny.layers={10**30}", "model.tiny.layers = 10+: input should be less than or equal to 512"),
        (f"model.tiny.mlp={10**30}", "model.tiny.mlp = .*: input should be less than or equal to 262144"),
        ("model.tiny.layers=0", "model.tiny.layers = 0: input should be greater than or equal to 1"),
        ("reward.metrics=[{name: verifier, clamp: [1, -1]}]", "clamp = .*first bound must be below the second"),
        ("train.importance={rule: mask, low: 3, high: 1}", "importance.low is 3 and high is 1; low must be below"),
        ("budget.max_calls=-5", "budget.max_calls = -5: input should be greater than or equal to 0"),
        ("budget.max_dollars=-0.1", "budget.max_dollars = -0.1: input should be greater"),
        ("episode.think=['','']", "episode.think.0 = '': "),
        ("credit.split=true", "credit.split has no effect with credit.by=tree; leave it out"),
        ("credit.gamma=0.5", "credit.gamma has no effect with credit.by=tree"),
        ("credit.gama=0.5", "unknown option 'gama' of credit rule 'tree' in credit"),
        (
            "train.method=ppo train.advantage=rloo",
            "advantage has no effect with train.method=ppo, only with rl",
        ),
        ("train.kto.beta=1", "train.kto has no effect with train.method=rl, only with kto; leave it out"),
        ("train.kl.estimator=k2", "train.kl.estimator has no effect with train.kl.weight=0.0; leave it out"),
        ("train.kl={weight: 1, where: reward, estimator: k2}", "kl.estimator has no effect with train.kl.where=reward"),
        ("train={method: ppo, kl: {weight: 0.1, estimator: k2}}", "kl.estimator has no effect with train.method=ppo"),
        ("train.importance.high=5", "train.importance.high has no effect with train.importance.rule=none"),
        ("train.schedule.min_lr=0.1", "train.schedule.min_lr has no effect with train.schedule.name=constant"),
        ("train.loss=cispo train.clip.low=0.1", "train.clip.low has no effect with train.loss.name=cispo"),
        ("train.loss=reinforce train.clip.low=0.1", "train.clip.low has no effect with train.loss.name=reinforce"),
        ("reward.overlong.penalty=-2", "reward.overlong.penalty has no effect with reward.overlong.rule=score"),
        ("train.method=dpoo", "unknown training method 'dpoo' in train.method; did you mean 'dpo'"),
        ("train={method: online-dpo, group_size: 1}", "online-dpo ranks the replies to a prompt"),
        ("train.group_size=1 credit=reply", "train.group_size is 1, but 'dr-grpo' compares the replies"),
        (
            "train={group_size: 1, advantage: {name: reinforce++, baseline: group}} credit=reply",
            "but 'reinforce\\+\\+' compares",
        ),
        ("train={loss: reinforce, minibatches: 2}", "'reinforce' has no ratio, but all of train.minibatches=2 after"),
        ("train={loss: reinforce, async_steps: 1}", "'reinforce' has no ratio, and with train.async_steps=1"),
        ("seed=-1", "seed = -1: input should be greater than or equal to 0"),
        ("train.importance={rule: mask, high: 0.5}", "high is 0.5, but the rule 'mask' .*set low <= 1 <= high"),
        ("train.importance={rule: mask, low: 1.5}", "low is 1.5 and high is 2, but the rule 'mask'"),
        (
            "train={group_size: 1, prompts_per_step: 1, advantage: reinforce++} credit=reply",
            "train.group_size and train.prompts_per_step are 1, but 'reinforce\\+\\+' compares the replies of a step",
        ),
        ("credit.tokens=thought episode.think=null", "credit.tokens=thought needs .*set them, or credit.tokens"),
        (
            "reward.metrics=[{name: verifier, tokens: thought}] episode.think=null",
            "reward.metrics.0.tokens=thought needs markers in episode.think",
        ),
        ("task.vague=1", "vague = 1: input should be less than or equal to 0.99"),
        ("model.lora={targets: []}", "model.lora.targets = \\[\\]: list should have at least 1 item"),
        ("model.lora={targets: ['']}", "model.lora.targets.0 = '': it must not be blank"),
        ("model.chat_template=''", "model.chat_template = '': it must not be blank"),
        ("name=''", "name = '': it names a folder: it must not be blank"),
        ("name=a/b", "name = 'a/b': it names a folder: .*`run_dir` takes a path"),
        ("name=..", "name = '..': it names a folder"),
        ("code=[/no/such/folder]", "code: there is no folder '/no/such/folder'"),
        ("task={name: remote, url: nowhere}", "url = 'nowhere': it should be an address, such as http://host:8000"),
    ],
)
def test_a_value_that_would_train_on_nothing_or_crash_is_refused(override: str, message: str) -> None:
    said = refused("quickstart", *re.split(r" (?=[\w.]+=)", override))
    assert re.search(message, said), said


def test_a_methods_keys_are_keys_of_train() -> None:
    keys = {key for name in methods.names() for key in method_of(name).reads}
    assert keys <= TrainConfig.model_fields.keys() and {"advantage", "data", "kl", "ppo"} <= keys
    assert not keys & {"method", "steps", "lr", "save"}, "what every method reads is not named"


def test_a_key_that_the_method_does_not_read_is_a_note_where_a_file_set_it() -> None:
    """Recipes for several methods may share files."""
    recipe = load_recipe("quickstart", ["train.method=ppo"]).recipe
    notes = [finding.says for finding in find(recipe, offline=True) if not finding.fatal]
    assert "train.advantage has no effect with train.method=ppo, only with rl; leave it out" in notes
    notes = [finding.says for finding in find(load_recipe("quickstart").recipe, offline=True)]
    assert not any("has no effect" in says for says in notes)


@pytest.mark.parametrize(
    "key",
    [
        *("train.lr", "train.kl", "train.clip", "train.steps", "train.epochs", "train.async_steps", "seed"),
        *("train.dynamic_sampling", "call_seconds", "keep_rollouts", "episode.temperature", "futures.rounds"),
        *("model.tiny.layers", "reward.max_missing", "eval.every", "budget.max_calls", "train.save.keep"),
        *("models.judge={model: policy, max_tokens: BOOL}", "model.lora={r: BOOL}", "task.vague"),
        *("reward.metrics=[{name: verifier, weight: BOOL}]", "reward.metrics=[{name: verifier, clamp: [-1, BOOL]}]"),
        *("reward.manager={name: pool, workers: BOOL}", "train.optimizer.betas=[BOOL, 0.9]"),
        "futures={name: classmates, classmates: [{name: peer, weight: BOOL}]}",
        "futures={name: classmates, classmates: [peer], weight: BOOL}",
    ],
)
@pytest.mark.parametrize("value", ["true", "false"])
def test_true_and_false_are_not_numbers(key: str, value: str) -> None:
    override = key.replace("BOOL", value) if "BOOL" in key else f"{key}={value}"
    assert "give a number, not true or false" in refused("quickstart", override)


@pytest.mark.parametrize(
    ("value", "kind", "misplaced"),
    [
        (True, int, True),
        (True, int | None, True),
        (True, bool | int, False),
        (True, Any, False),
        (True, str, False),
        (1, int, False),
        ([1, True], list[int], True),
        ([True], bool | list[int], True),
        ({"a": True}, dict[str, float], True),
        ({"a": True}, dict[str, Any], False),
        ([0.5, False], tuple[float, float], True),
        ([0.5, False], tuple[float, bool], False),
        ((1.0, True), tuple[float, ...], True),
        ({"top_k": True}, Sampling, True),
        ({"seed": 3}, Sampling, False),
    ],
)
def test_a_bool_is_refused_where_only_a_number_fits(value: Any, kind: Any, misplaced: bool) -> None:
    assert is_misplaced_bool(value, kind) is misplaced


@pytest.mark.parametrize("when", ["x", "0", "-3", "1.5", "", "²", "start2"])
def test_a_copy_of_the_policy_at_an_invalid_step_is_refused(when: str) -> None:
    with pytest.raises(UserError, match=r"should read 'policy@start', or 'policy@N'"):
        load_recipe("quickstart", [f"models.judge='policy@{when}'"])
    with pytest.raises(UserError, match=r"should read 'policy@start', or 'policy@N'"):
        check_names(load_recipe("classmate-mini", [f"futures.classmates=['policy@{when}']"]).recipe)


def test_settings_next_to_the_refused_ones_are_accepted() -> None:
    load_recipe("quickstart", ["train.importance={rule: mask, low: 0.5, high: 1}"])
    two = ["train={group_size: 1, prompts_per_step: 2, advantage: reinforce++}", "credit=reply"]
    check_names(load_recipe("quickstart", two).recipe)
    check_names(load_recipe("quickstart", ["credit.tokens=answer", "episode.think=null"]).recipe)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("futures.keep=[0.2,a]", "futures: keep = [0.2, 'a']: give a share above 0"),
        ("futures={name: classmates, classmates: [peer], reward: steps, cuts: 0}", "futures: cuts = 0: input should"),
        ("futures.weight=.nan", "futures: weight = nan: input should be a finite number"),
        ("futures.classmates=[peer, peer]", "'peer' appears twice"),
        ("futures.classmates=[{name: peer, weight: 0}]", "with a weight above 0"),
        ("futures.classmates=[]", "name at least one of the recipe's models"),
        ("futures={name: classmates, classmates: [peer], measure: mixed, mix: 7}", "futures: mix = 7: input should"),
        ("futures.mix=0.2", "'mix' does nothing without measure: mixed"),
        ("futures.classmates=[{name: peer, think: ['', '']}]", "classmates.0.think.0 = ''"),
        ("futures.max_tokens=0", "futures: max_tokens = 0: input should be greater"),
        ("futures.cutz=3", "unknown option 'cutz' of kind of future 'classmates' in futures; did you mean 'cuts'?"),
        ("episode.think=null", "set them, or futures.thought=reply"),
    ],
)
def test_options_of_classmates_have_bounds_like_the_recipes_own_keys(override: str, message: str) -> None:
    assert message in refused("classmate-mini", override)


def test_a_reward_without_terms_is_refused_only_if_nothing_else_gives_a_reward() -> None:
    silent = "reward.metrics=[{name: verifier, weight: 0}]"
    check_names(load_recipe("classmate-mini", [silent]).recipe)  # the classmates give the reward
    check_names(load_recipe("gsm8k-turns", [silent]).recipe)  # the environment may give the reward
    check_names(load_recipe("quickstart", ["reward.metrics=[]", "train.method=sft"]).recipe)
    assert "all weights in reward.metrics are 0" in refused("classmate-mini", silent, "futures.weight=0")


def test_a_step_wide_baseline_and_an_importance_weight_are_accepted_alternatives() -> None:
    check_names(load_recipe("quickstart", ["train.group_size=1", "train.advantage=reinforce++"]).recipe)
    check_names(load_recipe("quickstart", ["train={loss: reinforce, async_steps: 1, importance: truncate}"]).recipe)


@pytest.mark.parametrize("registry", KINDS, ids=lambda registry: registry.kind.replace(" ", "-"))
def test_every_numeric_option_of_a_registered_class_is_bounded(registry: Registry[Any]) -> None:
    wanting = []
    for name in registry.names():
        kinds_of = option_types(registry.get(name))
        own = {key for key in kinds_of if key not in FUTURE_NAMES or key == "seed"}
        wanting += [(name, key) for key in sorted(own) if kinds_of[key] is Any and key != "model"]
        wanting += [(name, key) for key in sorted(own) if _has_free_number(kinds_of[key])]
    assert set(wanting) <= ELSEWHERE


def _has_free_number(annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    if origin in (typing.Annotated, typing.Literal):
        return False
    return annotation in (int, float) or any(map(_has_free_number, typing.get_args(annotation)))


def test_an_annotation_only_for_the_type_checker_leaves_other_options_checked() -> None:
    def thing(helper: NowhereToBeFound, size: int) -> None:  # type: ignore[name-defined]  # noqa: F821
        """An option beside a type that is imported only for the type checker."""

    with pytest.raises(UserError, match="size = 'big': input should be a valid integer"):
        check_options(thing, {"size": "big"}, {"helper": None}, "thing", "")


ODD: list[Any] = [
    None, True, False, 0, 1, -1, 3, 10**30, 0.5, -0.5, 1e-12, 1e308, float("nan"), float("inf"), -float("inf"),
    "", " ", "x", "auto", "none", "0", "-1", "policy", "a.b:C", "no_such:Thing", "http://", "no/such/file", "\0", "ü",
    "%s{}", [], [0], [1, -1], ["a", "a"], ["", ""], [None], [[]], [0.2, "a"], {}, {"name": "x"}, {"name": 3}, {"": 0},
    {"a": {}},
]  # fmt: skip
"""Values that somebody might write anywhere."""
SAMPLE = str(Path(__file__).parent.parent / "tasks" / "gsm8k_sample.jsonl")
SMALL = {"model": {"tiny": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 16}}, "episode": {"max_tokens": 8}}
BASES: dict[str, dict[str, Any]] = {
    "talk": {"task": {"name": "slots", "rows_per_split": 8}, "futures": {"samples": 2, "rounds": 1}},
    "thoughts": {
        "task": {"name": "ciphers", "limit": 8},
        "models": {"peer": "policy@start"},
        "futures": {"name": "classmates", "classmates": ["peer"]},
    },
    "task": {"task": {"name": "gsm8k", "file": "arithmetic", "limit": 8}, "models": {"peer": "scripted:echo"}},
}


def keys() -> dict[str, Any]:
    """Every key of the reference and the options of everything it can name, with their types."""
    out: dict[str, Any] = {}
    reference = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "draw_reference.py"))
    for title, model, _ in reference["sections"]():
        prefix = "" if title == "top level" else f"{title.replace('NAME', 'peer').replace('.N', '.0')}."
        out |= {f"{prefix}{name}": field.annotation for name, field in model.model_fields.items()}
    places = {"task": tasks, "futures": kinds, "futures.user": users, "reward.manager": managers}
    places |= {"reward.metrics": metrics, "train.advantage": estimators, "train.loss": surrogates}
    for place, registry in places.items():
        inner = f"{place}.0" if place == "reward.metrics" else place
        for name in registry.names():
            out |= {f"{place}={name}|{inner}.{key}": kind for key, kind in _options(registry.get(name)).items()}
    return {key: kind for key, kind in out.items() if key not in ("run_dir", "trackers", "serve")}


def _options(thing: Any) -> dict[str, Any]:
    return {key: kind for key, kind in option_types(thing).items() if key not in FUTURE_NAMES}


def words(annotation: Any) -> list[Any]:
    """The strings that an annotation lists."""
    parts = typing.get_args(annotation)
    return (
        list(parts) if typing.get_origin(annotation) is typing.Literal else [w for part in parts for w in words(part)]
    )


def nowhere(name: str, *_: Any) -> Any:
    raise UserError(f"cannot load '{name}'")


def dry_run(base: str, key: str, value: Any, folder: Path) -> str:
    """The plan of a recipe with an odd value, '' if it is refused; anything but a `UserError` is a traceback."""
    setting, _, last = key.rpartition("|")
    place, _, name = setting.partition("=")
    file = {"file": SAMPLE} if place == "task" and "file" in _options(tasks.get(name)) else {}
    given = {place: [{"name": name}] if place == "reward.metrics" else {"name": name, **file}} if place else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_hub", nowhere)
        try:
            changed = {**given, "run_dir": str(folder / "run"), last: value}
            recipe = load_recipe({**SMALL, **copy.deepcopy(BASES[base])}, changed).recipe
            refuse(find(recipe, offline=True))
            return plan(recipe)
        except UserError as error:
            assert str(error).strip() and "\n" not in str(error).strip(), "one line that says what is wrong"
            return ""


KEYS = keys()
PAIRS = st.sampled_from(sorted(KEYS)).flatmap(
    lambda key: st.tuples(st.just(key), st.sampled_from(ODD) | st.sampled_from([*words(KEYS[key]), *ODD[-3:]]))
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(BASES)), PAIRS)
def test_an_odd_value_anywhere_is_planned_or_refused_without_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, base: str, pair: tuple[str, Any]
) -> None:
    logging.disable(logging.WARNING)
    try:
        dry_run(base, *pair, tmp_path_factory.getbasetemp())
    finally:
        logging.disable(logging.NOTSET)


def test_no_numeric_key_accepts_a_bool(tmp_path: Path) -> None:
    numbers = [key for key, kind in KEYS.items() if is_misplaced_bool(True, kind)]
    assert len(numbers) > 100
    for key in numbers:
        assert dry_run("thoughts", key, True, tmp_path) == "", key


def test_the_odd_values_reach_every_section_and_every_kind_of_registered_class() -> None:
    assert len(KEYS) > 300
    for part in (
        "train.optimizer.betas",
        "model.tiny.heads",
        "futures=classmates|futures.keep",
        "task=slots|task.vague",
    ):
        assert part in KEYS


@pytest.mark.parametrize("value", ["[]", "[2, 0]", "0", "two", "true", "1.5"])
def test_a_wrong_futures_samples_says_in_one_sentence_what_is_valid(value: str) -> None:
    with pytest.raises(UserError, match=r"futures\.samples = .*: .*whole number of 1 or more, or a list of them"):
        load_recipe("quickstart", [f"futures.samples={value}"])


@pytest.mark.parametrize("text", ['{"messages": []}', '{"row": "elsewhere", "messages": [], "futures": []}'])
def test_prompts_of_another_task_are_refused_by_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    with pytest.raises(UserError, match="there is no file"):
        WithheldTask(rows_per_split=4, prompts=str(file)).rows("train")
    file.write_text(text + "\n")
    with pytest.raises(UserError, match=r"line 1: .*not a reply of this task's training"):
        WithheldTask(rows_per_split=4, prompts=str(file)).rows("train")


def test_one_reply_per_prompt_is_enough_if_its_futures_are_compared() -> None:
    check_names(load_recipe("quickstart", ["train.group_size=1"]).recipe)
    for whole in (["credit=reply"], ["futures.rounds=0", "credit=reply"]):
        with pytest.raises(UserError, match=r"train\.group_size is 1"):
            check_names(load_recipe("quickstart", ["train.group_size=1", *whole]).recipe)
