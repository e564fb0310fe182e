"""What other projects call our keys and values: whoever uses such a word is refused, with ours in the message.

Only what people type by themselves; whole configs are carried over by `upshot recipe import`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

FOREIGN_KEYS = {
    **dict.fromkeys(("learning_rate", "learningrate", "actor_lr"), "train.lr"),
    **dict.fromkeys(("batch_size", "train_batch_size", "per_device_train_batch_size"), "train.prompts_per_step"),
    **dict.fromkeys(("num_generations", "rollouts_per_example", "num_samples"), "train.group_size"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "total_epochs"), "train.epochs"),
    **dict.fromkeys(("max_steps", "num_steps", "total_training_steps"), "train.steps"),
    **dict.fromkeys(("model_name", "model_path", "model_name_or_path", "base_model"), "model.path"),
    **dict.fromkeys(("max_new_tokens", "max_completion_length", "max_response_length"), "episode.max_tokens"),
    **dict.fromkeys(("kl_coef", "kl_loss_coef"), "train.kl"),
    **dict.fromkeys(("warmup", "warmup_ratio"), "train.schedule.warmup_steps"),
    **dict.fromkeys(("output_dir", "out_dir", "output"), "run_dir"),
    **dict.fromkeys(("dataset", "train_file", "data_path"), "task.file (sft, dpo: train.data)"),
    **dict.fromkeys(("algorithm", "algo", "adv_estimator"), "train.method"),
    "num_rollouts": "futures.samples",
    "system_prompt": "episode.system",
    "report_to": "trackers",
    "save_steps": "train.save.every",
    "eval_steps": "eval.every",
}
"""Word → our dotted key."""
FOREIGN_VALUES = {
    "train.method": {
        **{name: f"train.method=rl train.advantage={name}" for name in ("grpo", "dr-grpo", "rloo", "gdpo")},
        **dict.fromkeys(("drgrpo", "dr_grpo"), "train.method=rl train.advantage=dr-grpo"),
        **dict.fromkeys(("reinforce", "reinforce++"), "train.method=rl train.advantage=reinforce++"),
        **{name: f"train.method=rl train.loss={name}" for name in ("gspo", "cispo")},
        **dict.fromkeys(("online_dpo", "onlinedpo"), "train.method=online-dpo"),
    }
}
"""Of a key of ours, value → how it is said here."""


def translate_value(key: str, value: Any) -> str:
    """How a value of others is said here; empty where it is none of theirs."""
    return FOREIGN_VALUES.get(key, {}).get(str(value).lower(), "")


def translate_key(word: str, value: Any, known: Iterable[str]) -> str:
    """The tail of an error about an unknown key: where it is here; empty where nobody can tell.

    word: what was written, without its section. known: all dotted keys. A key of another section is found by its name.
    """
    translation = FOREIGN_KEYS.get(word.lower())
    places = (
        [translation] if translation else sorted((key for key in known if key.rpartition(".")[2] == word), key=_depth)
    )
    if not places:
        return ""
    if setting := translate_value(places[0], value):
        return f"here it is {setting}"
    return f"here it is {' or '.join(places[:3])}"


def _depth(key: str) -> tuple[bool, int, str]:
    """What a run is made by comes before its warm start, evaluation and budget; then by how deep it stands."""
    return key.partition(".")[0] in ("warm_start", "eval", "budget", "models"), key.count("."), key
