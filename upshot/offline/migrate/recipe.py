"""Settings of theirs → a recipe, or the line of `upshot data build`; and a list of what it could not carry.

`table.yaml` says what is called what; docs/migrate.md is made of it, too. Conversions of values that are no plain words
stand here, by the name that `how` has in the table.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import yaml

from upshot.offline.migrate.theirs import OriginalSettings

Keys = dict[str, Any]
SECRET = re.compile(r"api_?key|secret|password|access_token", re.IGNORECASE)
"""Settings whose values, or parts of them, are nobody's to print."""
KL_IN_LOSS, KL_IN_REWARD = "actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"
USER = {"futures.user.name": "llm", "futures.user.model": "user"}
BUILD = "upshot data build"


@dataclass(frozen=True)
class MappingLine:
    """One thing of an original and what it is here: a recipe key, a command, a metric, or a reason why not."""

    theirs: str
    kind: str
    key: str = ""
    how: str = ""
    """The conversion of its value; '' takes it as it is."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What each of its values is here, where they are words."""
    command: str = ""
    metric: str = ""
    reason: str = ""
    note: str = ""


class Original(NamedTuple):
    """One of the originals with its lines."""

    title: str
    origin: str
    lines: tuple[MappingLine, ...]

    def find(self, name: str) -> MappingLine | None:
        """The line of a flag or key: its own, else the longest pattern that fits."""
        fits = [line for line in self.lines if line.kind in ("flag", "key") and fnmatchcase(name, line.theirs)]
        return max(fits, key=lambda line: (line.theirs == name, len(line.theirs)), default=None)


@cache
def read_table() -> Keys:
    """table.yaml, with its rows as lines."""
    table: Keys = yaml.safe_load((Path(__file__).parent / "table.yaml").read_text(encoding="utf-8"))
    own = {name: about for name, about in table.items() if isinstance(about, dict) and "rows" in about}
    lines = {name: tuple(MappingLine(**row) for row in about["rows"]) for name, about in own.items()}
    return table | {name: Original(about["title"], about["origin"], lines[name]) for name, about in own.items()}


def originals() -> dict[str, Original]:
    """All originals by name."""
    return {name: about for name, about in read_table().items() if isinstance(about, Original)}


def page() -> str:
    """docs/migrate.md."""
    parts = [read_table()["head"]]
    for original in originals().values():
        parts += [f"## {original.title}\n\n{original.origin}\n", "| | theirs | ours | |\n|---|---|---|---|"]
        for line in original.lines:
            own = f"*on purpose not*: {line.reason}" if line.reason else f"`{line.key or line.command or line.metric}`"
            parts[-1] += f"\n| {line.kind} | `{line.theirs}` | {own} | {line.note} |"
        parts[-1] += "\n"
    return "\n".join(parts)


class Omission(Exception):
    """Why a setting was not carried."""


class TheirSetting(NamedTuple):
    """A setting of theirs on its way into the recipe."""

    key: str
    """The recipe key that the table names."""
    part: str
    """The last part of its name there."""
    value: Any
    others: Mapping[str, Any]
    """All their settings."""


def _refuse(why: str) -> Any:
    raise Omission(why)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else _refuse("it is no whole number that can be read off the script")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _object(value: Any) -> Mapping[str, Any]:
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        value = None
    return value if isinstance(value, Mapping) else _refuse("it is no JSON object")


def spec(given: Any) -> Any:
    """A model of litellm's naming as a spec: an address, a provider's, or a Hub name in this process."""
    if not isinstance(given, str) or given.lstrip().startswith("{"):
        given = _object(given)
        if address := given.get("api_base") or given.get("base_url"):
            return {"url": address, "model": str(given["model"]).removeprefix("openai/")}
        given = str(given.get("model", ""))
    if "/" not in given:
        providers = read_table()["providers"]
        return f"{next((p for start, p in providers.items() if given.startswith(start)), 'openai')}/{given}"
    return given if given.split("/")[0] in read_table()["hosted"] else f"local:{given}"


def _metrics(s: TheirSetting) -> Keys:
    """Names and weights of the original's two flags; its token_amount counts thousands."""
    names = _list(s.others.get("--metric_names", []))
    weights = _list(s.others.get("--metric_weights", [1.0] * len(names)))
    if len(weights) != len(names):
        raise Omission(f"{len(names)} metrics and {len(weights)} weights")
    return {f"metrics.{n}": w / 1000 if n == "token_amount" else w for n, w in zip(names, weights, strict=True)}


def _minibatches(s: TheirSetting) -> Keys:
    """How many updates a step's prompts make."""
    batch = s.others.get("data.train_batch_size")
    if not isinstance(batch, int) or not isinstance(s.value, int) or s.value < 1:
        raise Omission("it is counted against data.train_batch_size, which is not set")
    return {s.key: max(1, batch // s.value)}


def _batch(s: TheirSetting) -> Keys:
    """Examples of an update: those of a device times the accumulation times the processes."""
    size = s.others.get("--batch_size", s.others.get("--per_device_train_batch_size", 1))
    factors = (s.others.get(name, 1) for name in ("--gradient_accumulation_steps", "--nproc_per_node"))
    return {s.key: _whole(math.prod(factors, start=size))}


def _file(s: TheirSetting) -> Keys:
    """One file; the home folder as `~`."""
    if len(_list(s.value)) != 1:
        raise Omission("a task reads one file a split; put them into a folder, or mix tasks (task.name=mix)")
    return {s.key: re.sub(r"^\$\{?HOME\}?", "~", str(_list(s.value)[0]))}


def _kl(s: TheirSetting, on: Any, keys: Keys) -> Keys:
    """What is said of the KL divergence counts where that is on: in the loss, or off the reward, not both."""
    if s.key == "train.kl.where" and on and s.others.get(KL_IN_LOSS):
        raise Omission("the KL divergence is in the loss (use_kl_loss) or taken off the reward, not both")
    return keys if on else {}


def _marks(s: TheirSetting, whose: str = "") -> Any:
    marks = [s.others.get(f"reward_model.{whose}think_{end}_str") for end in ("start", "end")]
    return marks if all(marks) else None


def _classmates(s: TheirSetting) -> Keys:
    """Each classmate a helper model, with its own markers where they are set."""
    models = {"peer" if n == 0 else f"peer{n + 1}": f"local:{model}" for n, model in enumerate(_list(s.value))}
    think = {"think": marks} if (marks := _marks(s, "classmate_")) else {}
    return {**{f"models.{n}": model for n, model in models.items()}, s.key: [{"name": n, **think} for n in models]}


def _sampling(s: TheirSetting, prefix: str) -> Keys:
    names = ("temperature", "max_tokens", *(("top_p",) if prefix == "episode" else ()))
    return {f"{prefix}.{name}": _object(s.value)[name] for name in names if name in _object(s.value)}


def _names(s: TheirSetting) -> Keys:
    return {s.key: [name.strip() for one in _list(s.value) for name in str(one).split(",")]}


NO_FILE = "give that file as well; without it the user is the published one, gpt-4o-mini"
CONVERSIONS: dict[str, Callable[[TheirSetting], Keys]] = {
    "assistant": lambda s: _sampling(s, "episode"),
    "batch": _batch,
    "classmates": _classmates,
    "clip": lambda s: {"train.clip.low": s.value, "train.clip.high": s.value},  # one number there
    "file": _file,
    "interaction": lambda s: {} if any(key.startswith("interaction.") for key in s.others) else _refuse(NO_FILE),
    "judge": lambda s: {"models.judge": spec(s.value)},
    "judge_tokens": lambda s: _refuse("each judged metric has its own (2048): reward.metrics.accuracy.max_tokens=…"),
    "kl": lambda s: _kl(s, s.others.get(KL_IN_LOSS, not s.others.get(KL_IN_REWARD)), {s.key: s.value}),
    "kl_in": lambda s: _kl(s, s.value, {s.key: "reward"}),
    "kl_of_reward": lambda s: _kl(s, s.others.get(KL_IN_REWARD) and not s.others.get(KL_IN_LOSS), {s.key: s.value}),
    "kl_on": lambda s: _kl(s, not s.value and not s.others.get(KL_IN_REWARD), {s.key: 0.0}),
    "lora": lambda s: {"model.lora.r": s.others.get("--peft_r", 32)} if s.value else {},
    "metrics": _metrics,
    "minibatches": _minibatches,
    "monitor": lambda s: {"models.monitor": spec(s.value), s.key: "monitor"},
    "name": lambda s: {s.key: re.sub(r"[^\w.-]+", "-", str(s.value)).strip("-")[:80]},
    "names": lambda s: {} if s.value == "all-linear" else _names(s),
    "not_negative": lambda s: {s.key: max(0, _whole(s.value))},  # −1 there is 0 here
    "rank": lambda s: {s.key: s.value} if s.value else {},  # rank 0 trains all weights
    "rounds": lambda s: {s.key: (int(s.value) + 1) // 2},  # messages there, pairs of them here
    "think": lambda s: {s.key: _marks(s) or _refuse("a marker alone; both are needed")},
    "trackers": lambda s: {s.key: [one for one in _list(s.value) if one in ("wandb", "tensorboard", "trackio")]},
    "user": lambda s: {"models.user": spec(_object(s.value)), **USER, **_sampling(s, "futures.user")},
    "user_model": lambda s: {"models.user.model": spec(s.value), **USER},
    "user_option": lambda s: {f"futures.user.{s.part}": s.value},
    "user_retries": lambda s: {"models.user.retries": s.value},
    "wandb": lambda s: {s.key: ["wandb"]},  # a project means that it is used
    "weight": lambda s: {f"metrics.{s.part}": s.value},
    "with_classmates": lambda s: {},  # carried with the classmates themselves
}


@dataclass
class ImportedRecipe:
    """A recipe as nested mappings, and what is not in it."""

    keys: Keys
    """Dotted keys and their values, `metrics.NAME` among them."""
    left: list[tuple[str, Any, str]]
    """(key, value, why)."""
    clamp: list[int] | None = None

    @property
    def recipe(self) -> Keys:
        """The keys as nested mappings; metrics as the list that a recipe has."""
        out: Keys = {}
        for key, value in self.keys.items():
            if key.startswith("metrics."):
                term = {"name": key.removeprefix("metrics."), "weight": float(value), "clamp": self.clamp}
                out.setdefault("reward", {}).setdefault("metrics", []).append(term)
                continue
            *parents, last = key.split(".")
            node = out
            for part in parents:
                node = node.setdefault(part, {})
            node[last] = value
        return out


def carry(theirs: OriginalSettings) -> ImportedRecipe:
    """What can be carried over, in the recipe's own words."""
    # The verl recipe's reward manager bounds every term, CollabLLM's own does not.
    done = ImportedRecipe({}, [], None if theirs.original == "collabllm" else [-1, 1])
    for name, value in theirs.settings.items():
        if value is not None:  # null is the key left out
            try:
                done.keys |= _convert(theirs, name, value)
            except Omission as why:
                done.left.append((name, "…" if SECRET.search(f"{name} {value}") else value, str(why)))
    _complete(done, theirs)
    return done


def _convert(theirs: OriginalSettings, name: str, value: Any) -> Keys:
    """What a setting is in the recipe; the classmate fork has verl's settings, too."""
    tables = ("classmate", "verl") if theirs.original == "classmate" else (theirs.original,)
    fits = [line for table in tables if (line := originals()[table].find(name)) is not None]
    best = max(fits, key=lambda line: len(line.theirs), default=None)
    if best is None or not best.key:
        raise Omission("no counterpart is known" if best is None else best.reason or f"is `{best.command}`")
    if "$" in str(value) and best.how not in ("file", "name", "interaction"):
        raise Omission("the shell alone knows its value")
    if best.how:
        return CONVERSIONS[best.how](TheirSetting(best.key, name.rpartition(".")[2], value, theirs.settings))
    if best.values and str(value) not in best.values:
        raise Omission(f"known are {', '.join(best.values)}")
    own = best.values[str(value)] if best.values else value
    return own if best.values and isinstance(own, dict) else {best.key: own}


def _complete(done: ImportedRecipe, theirs: OriginalSettings) -> None:
    """Add what their programs take for granted: the method, the task, who plays the user."""
    table, keys = read_table(), done.keys
    done.keys = keys = {"name": keys.pop("name", theirs.original), **keys}
    if method := table["methods"].get(_program(theirs)):
        keys.setdefault("train.method", method)
    if "task.name" not in keys:
        path, usual = str(keys.get("task.train_file", "")).lower(), table["usual_task"][theirs.original]
        keys |= next((task for word, task in table["tasks"].items() if word in path), {"task.name": usual})
    if keys.get("train.method") in ("sft", "dpo"):
        _learn_from_examples(done, theirs)
    if theirs.original == "classmate" and "futures.classmates" in keys:
        keys["futures.name"] = "classmates"
    elif keys.get("futures.rounds"):
        if "models.user.model" not in keys:
            keys.setdefault("models.user", "openai/gpt-4o-mini")
        keys |= USER


def _program(theirs: OriginalSettings) -> str:
    """The last word of what is launched."""
    return re.split(r"[./]", theirs.program.removesuffix(".py"))[-1]


def _learn_from_examples(done: ImportedRecipe, theirs: OriginalSettings) -> None:
    """Where sft and dpo learn from: the file that is named, or the one that must be made of a published set first."""
    keys, settings = done.keys, theirs.settings
    source, method = str(keys.pop("task.train_file", "")), keys["train.method"]
    keys.pop("task.validation_file", None)
    folder = f"data/{keys['task.name']}"
    file = source if PurePath(source).suffix in (".parquet", ".jsonl", ".json") else f"{folder}/{method}_train.parquet"
    if source and file != source:
        metric = str(settings.get("--lower_bound_metric") or "").removeprefix("rewards.")
        least = f" --min {metric}={settings.get('--lower_bound', 0)}" if metric else ""
        how = f"make the file first: upshot data prepare --dataset {source} --for {method}{least} --out {folder}"
        done.left.append(("train.data", file, how))
    keys |= {"train.data": file, **({"task.file": file} if keys["task.name"] == "collabllm" else {})}


def builds(theirs: OriginalSettings) -> bool:
    """Whether their script builds data (`scripts.engine.build_dataset`) and trains nothing."""
    return _program(theirs) == "build_dataset"


def build_line(theirs: OriginalSettings) -> tuple[str, ImportedRecipe]:
    """The command that builds the same data, and what it could not carry."""
    settings = read_table()["build_defaults"] | theirs.settings
    carried = carry(OriginalSettings(theirs.program, settings))
    assistant, keys = settings.get("--assistant_generation_kwargs"), carried.keys
    metrics = [f"{key.removeprefix('metrics.')}={w:g}" for key, w in keys.items() if key.startswith("metrics.")]
    options = {"--policy": spec(assistant) if assistant else "…", "--metrics": ",".join(metrics)}
    options |= {flag: keys[key] for key, flag in read_table()["build_options"].items() if key in keys}
    words = [BUILD]
    for flag, value in options.items():
        given = f"{value['url']}#{value['model']}" if isinstance(value, Mapping) else str(value)
        words += [f"{flag} {shlex.quote(given)}"] if given else []
    for name, value in settings.items():  # flags that are flags of the builder here, too, some with their value
        line = originals()["collabllm"].find(name)
        flag = line.command.removeprefix(BUILD).strip() if line and line.command.startswith(BUILD) else ""
        if flag and "--push" not in flag:  # nothing is published that nobody asked for here
            words.append(re.sub(r"\b[A-Z]+\b", str(value), flag))
            carried.left = [item for item in carried.left if item[0] != name]
    return " \\\n    ".join(words), carried


if __name__ == "__main__":
    print(page(), end="")
