"""Settings of an original → a recipe, or the command that does the same; and a list of what could not be carried over.

`table.yaml` maps their names to ours, and docs/migrate.md is made from it; this file has the conversions that its `how`
names. What only the author can know (the task of an unknown file, the classmates) is asked for, never guessed.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from upshot.config.layers import CALL, put, untag
from upshot.config.load import read_yaml
from upshot.config.method import method_of
from upshot.config.other_names import translate_key
from upshot.config.recipe import Recipe
from upshot.config.validation import model_at
from upshot.core.errors import UserError
from upshot.offline.migrate.theirs import MAP, RANKS, OriginalSettings

Keys = dict[str, Any]  # dotted keys and their values, or a row of the table, whose fields are explained there
SECRET = re.compile(r"api_?key|secret|password|access_token", re.IGNORECASE)  # never printed
BACKEND, CLASSMATES = "reward_model.llm_judge_backend_type", "reward_model.classmate_cot_reward_configs"
LOOP = re.compile(r"\$\{?([a-z_]\w*)\}?")
BATCH = ("--batch_size", "--per_device_train_batch_size", "--gradient_accumulation_steps", *RANKS)


@cache
def read_table() -> Keys:
    """table.yaml, with the rows of all originals as `rows`; rows of a separate original name it (`of`)."""
    table: Keys = read_yaml(Path(__file__).parent / "table.yaml", "table")
    originals = table["originals"].items()
    of = {name: name if original.get("alone") else "" for name, original in originals}
    return table | {"rows": [{**row, "of": of[name]} for name, original in originals for row in original["rows"]]}


def find_line(name: str, *kinds: str, of: str = "") -> Keys:
    """The row of a setting: its own, or else the longest pattern that matches; an empty row if there is none."""
    rows = (row for row in read_table()["rows"] if row["of"] == of and row["kind"] in kinds)
    fits = [row for row in rows if fnmatchcase(name, row["theirs"])]
    return max(fits, key=lambda row: (row["theirs"] == name, len(row["theirs"])), default={})


def find_script(program: str) -> Keys:
    """The row of a program, by the last part of its name; an empty row if it is unknown."""
    known = re.compile(rf"(.*[./])?{re.split(r'[./]', program.removesuffix('.py'))[-1]}(\.py)?")
    scripts = (row for row in read_table()["rows"] if row["kind"] == "script" and known.fullmatch(row["theirs"]))
    # For a separate original the folder must match as well: every project has a finetune.py.
    return next((row for row in scripts if not row["of"] or PurePath(row["theirs"]).parts[0] in program), {})


class TheirSetting(NamedTuple):
    """A setting of an original that is being converted: its row, name and value, and all other settings."""

    line: Keys
    name: str
    value: Any
    others: Mapping[str, Any]

    def to(self, value: Any) -> Keys:
        """The value for the recipe key that the row names, with the keys that come with it."""
        return {self.line["key"]: value, **self.line.get("set", {})}

    def refuse(self) -> Any:
        """Do not convert it, for the reason in the row."""
        raise ValueError(self.line["unless"])

    def whole(self, value: Any) -> int:
        """A whole number."""
        return value if isinstance(value, int) else self.refuse()

    def items(self) -> list[Any]:
        """The value as a list."""
        return self.value if isinstance(self.value, list) else [self.value]


def spec(model: Any) -> Any:
    """A model named as in litellm: a URL, provider/model, or a bare name whose provider is known."""
    if isinstance(model, Mapping):
        if address := model.get("api_base") or model.get("base_url"):
            return {"url": address, "model": str(model["model"]).removeprefix("openai/")}
        model = model.get("model", "")
    starts = read_table()["providers"].items()
    return model if "/" in model else f"{next((p for start, p in starts if model.startswith(start)), 'openai')}/{model}"


def local_spec(name: Any) -> str:
    """A model named as in Hugging Face: a Hub name (loaded here) or a folder; more slashes mean a provider's model."""
    return f"local:{name}" if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(name)) else str(name)


def _person(s: TheirSetting) -> Keys:
    """Who speaks, and how: a model name of litellm's, or its arguments as JSON."""
    call = json.loads(s.value) if isinstance(s.value, str) and s.value.lstrip().startswith("{") else s.value
    sampling = {f"{s.line['sampling']}.{name}": call[name] for name in s.line.get("samples", ()) if name in call}
    return {**s.to(spec(call)), **sampling}


def _metrics(s: TheirSetting) -> Keys:
    """Names and weights of the original's flags; its token_amount counts thousands."""
    names, weights = (s._replace(value=s.others.get(flag, [])).items() for flag in s.line["flags"])
    scales = [0.001 if name == "token_amount" else 1.0 for name in names]
    terms = zip(names, weights or [1.0] * len(names), scales, strict=False)
    return s.to([{"name": n, "weight": w * k} for n, w, k in terms]) if len(weights) in (0, len(names)) else s.refuse()


def _weights(s: TheirSetting) -> Keys:
    """The metrics of the verl recipe by their names here; its reward manager bounds every term."""
    start, named = s.name.rpartition(".")[0] + ".", s.line["names"]
    weights = {key.removeprefix(start): weight for key, weight in s.others.items() if key.startswith(start)}
    return s.to([{"name": named.get(n, n), "weight": float(w), "clamp": [-1, 1]} for n, w in weights.items()])


def _kl(s: TheirSetting) -> Keys:
    """Settings of the KL divergence count only where it is switched on: in the loss or in the reward, not both."""
    in_reward = s.others.get("algorithm.use_kl_in_reward")
    in_loss = s.others.get("actor_rollout_ref.actor.use_kl_loss", not in_reward)
    if s.name.endswith("use_kl_in_reward"):
        return {} if not in_reward else s.refuse() if in_loss else s.to("reward")
    if s.name.endswith("use_kl_loss"):
        return {} if in_loss or in_reward else s.to(0.0)
    counts = in_loss if s.name.endswith("kl_loss_coef") else in_reward and not in_loss
    return s.to(s.value) if counts else {}


def _is_talk(others: Mapping[str, Any]) -> bool:
    """Whether several turns are futures of a reply, played with a simulated user, and not the reply's own."""
    return any("num_repeat_rollouts" in key or key.startswith("interaction.") for key in others)


def _interaction(s: TheirSetting) -> Keys:
    """Converted with the named file; for gsm8k, the environment says after each turn what is wrong."""
    known = "gsm8k" in str(s.value) or any(key.startswith("interaction.") for key in s.others)
    return {} if known else s.refuse()


def _cot_monitor(s: TheirSetting) -> Keys:
    """A monitor of the thoughts; the fork's default if none is named."""
    named = s.others.get("reward_model.monitor_model_name")
    return {"eval.monitor": "monitor", **({} if named else {s.line["key"]: s.line["value"]})} if s.value else {}


def _think(s: TheirSetting, whose: str = "") -> Any:
    marks = [str(s.others.get(f"reward_model.{whose}think_{end}_str") or "").strip() for end in ("start", "end")]
    return marks if all(marks) else None


def _classmates(s: TheirSetting) -> Keys:
    """Each classmate becomes a helper model, with its own markers if set; a map of served models overrides them."""
    if MAP in s.others:
        return {}
    models = {"peer" if n == 0 else f"peer{n + 1}": local_spec(model) for n, model in enumerate(s.items())}
    think = {"think": marks} if (marks := _think(s, "classmate_")) else {}
    return {**{f"models.{n}": model for n, model in models.items()}, **s.to([{"name": n, **think} for n in models])}


def _judge(s: TheirSetting) -> Keys:
    """The fork's judge: a model that rates, or a reward model; it scores the classmates' answers, too."""
    if s.others.get(BACKEND) != "hf_scoring":
        return s.to(local_spec(s.value))
    metric = {"reward.metrics": [{"name": "rm_score", "model": s.value, "squash": "none"}]}
    return metric | ({"futures.metric": "rm_score"} if any("classmate" in key for key in s.others) else {})


def _mixture(s: TheirSetting) -> Keys:
    """The only data set of a mixture; a mixture lists names, each with a share or a number of rows."""
    words = " ".join(map(str, s.items())).split()
    return s.to(words[0]) if len(words) <= 2 else s.refuse()


def _episodes(s: TheirSetting) -> Keys:
    """Replies there, steps here."""
    each = [s.whole(s.others.get(f"--num_{what}_rollout")) for what in ("unique_prompts", "samples_per_prompt")]
    return s.to(max(1, s.whole(s.value) // math.prod(each)))


CONVERSIONS: dict[str, Callable[[TheirSetting], Keys]] = {
    "base": lambda s: s.refuse() if "--model_name" in s.others else s.to(s.value),
    "batch": lambda s: s.to(math.prod(s.whole(s.others.get(name, 1)) for name in BATCH)),  # on all devices
    "classmates": _classmates,
    "code_api": lambda s: s.to(f"opencode+{str(s.value).rstrip('/').removesuffix('/test_program')}"),
    "context": lambda s: s.to(s.whole(s.value) + s.whole(s.others.get("--response_length"))),  # and the reply's
    "dpo_beta": lambda s: s.to(s.value) if s.others.get("--loss_type") == "dpo" else s.refuse(),
    "episodes": _episodes,
    "file": lambda s: s.to(str(s.items()[0]).replace("$HOME", "~")) if len(s.items()) == 1 else s.refuse(),
    "assistant_turns": lambda s: {} if _is_talk(s.others) else s.to(s.whole(s.value)),  # of futures: one for each round
    "critic": lambda s: s.refuse() if s.others.get("algorithm.adv_estimator") == "gae" else {},
    "cot_monitor": _cot_monitor,
    "interaction": _interaction,
    "judge": _judge,
    "keep": lambda s: s.to([s.others.get(f"{CLASSMATES}.main_cot_keep_rate_{end}") for end in ("min", "max")]),
    "kl": _kl,
    "metrics": _metrics,
    "minibatches": lambda s: s.to(max(1, s.whole(s.others.get("data.train_batch_size")) // s.whole(s.value))),
    "mixture": _mixture,
    "monitor": lambda s: s.refuse() if s.others.get(BACKEND) == "hf_scoring" else s.to(local_spec(s.value)),
    "name": lambda s: s.to(re.sub(r"[^\w.-]+", "-", str(s.value)).strip("-")[:80]),
    "names": lambda s: {} if s.value == "all-linear" else s.to(re.split(r",\s*", ",".join(s.items()))),
    "norm": lambda s: s.to("dr-grpo") if not s.value and s.others.get("algorithm.adv_estimator") == "grpo" else {},
    "not_negative": lambda s: s.to(max(0, s.whole(s.value))),  # −1 there is 0 here
    "person": _person,
    "rank": lambda s: s.to(s.value) if s.value else {},  # rank 0 trains all weights
    "rounds": lambda s: s.to((int(s.value) + 1) // 2),  # messages there, pairs of them here
    "sandbox": lambda s: s.to(f"fusion+{str(s.value).rstrip('/').removesuffix('/run_code')}"),
    "set": lambda s: {} if str(s.value) in s.line["values"] else s.refuse(),  # what is so here in any case
    "share": lambda s: s.to(float(s.value)) if isinstance(s.value, int | float) and s.value >= 0 else s.refuse(),
    "thinking": lambda s: s.to({"enable_thinking": bool(s.value)}),
    "tools": lambda s: {} if "gsm8k" in str(s.value) else s.refuse(),  # the environment says whether it is right
    "user_turns": lambda s: s.to(s.whole(s.value)) if _is_talk(s.others) else {"episode.max_turns": s.whole(s.value)},
    "value": lambda s: s.to(s.line["value"]) if s.value else {},  # whatever it is, as long as it is something
    "with_classmates": lambda s: {},  # carried with the classmates themselves
    "think": lambda s: s.to(_think(s) or s.refuse()),
    "trackers": lambda s: s.to([one for one in s.items() if one in ("wandb", "tensorboard", "trackio")]),
    "weights": _weights,
}


class ImportedRecipe(NamedTuple):
    """The recipe's keys, and the settings left out: (key, value, why)."""

    keys: Keys
    left: list[tuple[str, Any, str]]
    stops: list[str]
    """The settings left out that change what is learned."""

    @property
    def recipe(self) -> Keys:
        """The keys as nested mappings."""
        out: Keys = {}
        for key in sorted(self.keys, key=lambda key: key.count(".")):  # a model before its options
            put(out, key, self.keys[key], CALL)
        return untag(out)  # type: ignore[no-any-return]


def carry(theirs: OriginalSettings) -> ImportedRecipe:
    """Everything that can be carried over, as recipe keys."""
    done, tasks = ImportedRecipe(keys := Keys(name="imported"), [], []), read_table()["tasks"]
    is_rl = any(key.startswith("actor_rollout_ref.") for key in theirs.settings)
    script = find_script(theirs.program or ("verl.trainer.main_ppo" if is_rl else ""))
    settings = script.get("defaults", {}) | theirs.settings
    for name, value in settings.items():
        if value is not None:  # null means that the key is not set
            try:
                keys.update(_convert(settings, name, value, script.get("of", "")))
            except ValueError as why:
                secret = SECRET.search(f"{name} {value}")
                done.left.append((name, "…" if secret else value, str(why)))
                if not secret and changes_learning(name, value, script.get("of", "")):
                    done.stops.append(name)
    keys.update(script.get("keys", {}))
    if "task.name" not in keys:  # guess from a word in the path of the data, or from who talks
        path = str(keys.get("task.train_file", keys.get("task.file", ""))).lower()
        word = next((word for word in tasks if word in path), "a simulated user" if "futures.rounds" in keys else "")
        keys.update(tasks.get(word) or {})
    if not method_of(keys.get("train.method", "rl")).samples:
        _learn_from_examples(done, settings, script.get("make", ""))
    if keys.get("futures.rounds"):
        keys.update({"models.user": "openai/gpt-4o-mini", **read_table()["user"]} | keys)
    if "futures.classmates" in keys:
        keys["futures.name"] = "classmates"
    return done


def changes_learning(name: str, value: Any, of: str) -> bool:
    """Whether leaving a setting out may change what is learned; an unknown setting may."""
    line = find_line(name, "flag", "key", "file", of=of)
    if "learns" in line:
        harmless = line["learns"]
        return harmless is not None and not any(one == value or fnmatchcase(str(value), str(one)) for one in harmless)
    return not line["key"].startswith(tuple(read_table()["beside"])) if "key" in line else not line


def _convert(others: Mapping[str, Any], name: str, value: Any, of: str) -> Keys:
    """The recipe keys for a setting."""
    line = find_line(name, "flag", "key", "file", of=of)
    if name in RANKS and "data.train_files" in others:  # verl's batch is that of all ranks together
        return {}
    if not line and "." in name and model_at(Recipe, name.split(".")[:-1]):  # it is one of our keys
        return {name: value}
    if "key" not in line:
        known = translate_key(re.split(r"[-.]", name)[-1], value, ()) or "no counterpart is known"
        raise ValueError(line.get("reason") or (f"is `{line['command']}`" if line else known))
    if "$" in str(value).replace("$HOME", "") and line.get("how") not in ("name", "interaction", "tools"):
        raise ValueError("only the shell knows its value")
    if "how" in line:
        return CONVERSIONS[line["how"]](TheirSetting(line, name, value, others))
    values = line.get("values", {str(value): value})
    if str(value) not in values:
        raise ValueError(f"known values: {', '.join(values)}")
    converted = values[str(value)]
    return converted if "values" in line and isinstance(converted, dict) else {line["key"]: converted}


def _learn_from_examples(done: ImportedRecipe, settings: Mapping[str, Any], make: str) -> None:
    """The data of methods that do not sample: the named files, or files to be made from a published set first."""
    keys, method = done.keys, done.keys["train.method"]
    data, held_out = keys.pop("task.file", keys.pop("task.train_file", "")), keys.pop("task.validation_file", "")
    if PurePath(data).suffix not in (".parquet", ".jsonl", ".json"):
        folder = f"data/{keys.get('task.name', 'examples')}"
        metric = str(settings.get("--lower_bound_metric") or "").removeprefix("rewards.")
        least = f" --min {metric}={settings.get('--lower_bound', 0)}" if metric else ""
        least += f" --min-gap {settings.get('--minimum_gap', 0.02)}" if method_of(method).pairs else ""
        how = f"upshot data prepare --dataset {data} --for {method}{least} --out {folder}"
        file, held_out = (f"{folder}/{method}_{split}.parquet" for split in ("train", "validation"))
        if make:  # of a set that comes without held-out rows
            how, held_out = make.format(data=data or "NAME", folder=folder, file=file), ""
        data = file
        done.left.append(("train.data", data, f"make the files first: {how}"))
    keys.update({"train.data": data, **({"eval.data": held_out} if held_out else {})})


def ask(theirs: OriginalSettings, done: ImportedRecipe) -> None:
    """Refuse settings that only their author can complete, and show the arguments that complete them."""
    asks, key = read_table()["asks"], f"{CLASSMATES}.classmate_model_name_or_path_list"
    if "classmate" in theirs.program and "futures.classmates" not in done.keys:
        where = "is null in the files given" if key in theirs.settings else "stands in its YAML"
        raise UserError(asks["classmates"].format(program=theirs.program, key=key, where=where))
    judged = done.keys.get("task.name") == "judged" and "reward.metrics" not in done.keys
    if judged and "models.judge" not in done.keys:
        raise UserError(asks["judge"].format(behaviour=done.keys.get("task.behaviour", "its behaviour")))
    if "task.name" not in done.keys:
        path = done.keys.get("task.train_file") or done.keys.get("train.data", "none named")
        raise UserError(asks["task"].format(path=path))


def refuse_losses(done: ImportedRecipe, dropped: Sequence[str]) -> None:
    """Refuse to leave out settings that change what is learned, unless --drop names them."""
    allowed = {key.lstrip("-") for key in dropped}
    lost = [item for item in done.left if item[0] in done.stops and item[0].lstrip("-") not in allowed]
    if lost:
        items = "; ".join(f"{key}={value} ({why})" for key, value, why in lost)
        words = " ".join(f"--drop={key}" for key, _, _ in lost)
        raise UserError(
            f"settings that change what is learned have no counterpart: {items}. To continue without them: {words}"
        )


def command_line(theirs: OriginalSettings, script: Keys) -> tuple[str, ImportedRecipe]:
    """The command for a script that does not train, and the settings it could not carry over."""
    settings = script.get("defaults", {}) | theirs.settings
    done, verb = carry(OriginalSettings(theirs.program, settings)), script["command"].split(" --")[0]
    lines = {name: line for name in settings if (line := find_line(name, "flag")).get("command", "").startswith(verb)}
    options = {name: line["command"].removeprefix(verb).strip() for name, line in lines.items()}
    words = [re.sub(r"\bRUN\b", "$run", script["command"])]  # the caller of the command says which run
    for name, option in (options | script.get("options", {})).items():  # one of their flags, or a recipe key
        value = done.keys.get(name, settings.get(name, ""))
        value = lines.get(name, {}).get("values", {}).get(str(value), value)
        if isinstance(value, list):
            value = ",".join(f"{metric['name']}={metric['weight']:g}" for metric in value)
        text_value = f"{value['url']}#{value['model']}" if isinstance(value, Mapping) else str(value)
        text_value = re.sub(r"^(\$HOME\b|\$\{HOME\})", "~", text_value)
        shown = shlex.quote(local_spec(text_value) if name == "model.path" else text_value).replace("\\", r"\\")
        if text_value and option and "--push" not in option:  # an import must not publish anything
            words.append(re.sub(r"\b[A-Z]+\b", shown, option))
            done.left[:] = [item for item in done.left if item[0] != name]
    if script["command"].startswith("upshot data prepare") and "--out" not in " ".join(words):
        words.append(f"--out data/{PurePath(theirs.program).stem}")
    text = " \\\n    ".join(words)
    loops = list(dict.fromkeys(LOOP.findall(text)))  # variables of the script's loops; here the caller sets them
    for name in loops:
        text = re.sub(rf"'([^']*\$\{{?{name}\b[^']*)'", r'"\1"', text)
    heads = [f"{name}=${{{number}:?give its value}}\n" for number, name in enumerate(loops, 1)]
    return "".join(heads) + text, done
