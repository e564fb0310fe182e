"""The settings of `upshot.reward(...)`, each defined once: its type, default, least value and meaning.

The keyword arguments of `reward`, their checks (`api/reward.py`) and the options of `upshot score`, `eval` and `data
build` (`cli/options.py`) are made from these lines. `upshot score --help` reads them, so nothing heavy is imported
here: the classes are imported for the type checker only, and `reward` checks them when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict

if TYPE_CHECKING:
    from upshot.config.model_spec import ModelSpec
    from upshot.models.base import Model
    from upshot.models.client.budget import Budget
    from upshot.rewards.build import Metrics
    from upshot.rollout.play import ReplyRule
    from upshot.tasks.base import Task
    from upshot.tasks.participants.base import Participant

    ModelLike = str | Mapping[str, Any] | ModelSpec | Model
    """An address (`http://…/v1#name`), `provider/model`, a folder, `scripted:…`, a mapping with options, a `Model`."""
else:
    Budget = Metrics = ModelLike = Participant = ReplyRule = Task = Any

METRICS: Mapping[str, float] = {"accuracy": 1.0, "interactivity": 1.0}
OVERLONG_RULES = ("score", "missing", "penalty")


class Setting(NamedTuple):
    """What a setting declares besides its name and type."""

    default: Any
    help: str
    least: float | None = None
    """The smallest accepted number; None: the setting is not a number."""
    choices: tuple[str, ...] = ()


class RewardOptions(TypedDict, total=False):
    """The keyword arguments of `reward`: facts of the row, who continues the conversation, and how it is scored."""

    goal: Annotated[Any, Setting(None, "what the user wants")]
    reference: Annotated[Any, Setting(None, "the right answer or document")]
    meta: Annotated[dict[str, Any] | None, Setting(None, "further fields of the row (tests, task_desc, persona …)")]
    seed: Annotated[int, Setting(0, "seed of the sampling")]
    policy: Annotated[ModelLike | None, Setting(None, "the model that replied; it speaks in the futures")]
    user: Annotated[ModelLike | Participant | None, Setting(None, "the model that plays the user in the futures")]
    judge: Annotated[ModelLike | None, Setting(None, "the model that judges and extracts")]
    metrics: Annotated[Metrics, Setting(METRICS, "metrics of the reward, with their weights or settings")]
    samples: Annotated[int, Setting(3, "futures per reply", least=1)]
    rounds: Annotated[int, Setting(2, "longest future, in rounds; 0 scores the reply as it stands", least=0)]
    max_tokens: Annotated[int, Setting(1024, "longest turn of the policy, in tokens", least=1)]
    temperature: Annotated[float, Setting(1.0, "sampling temperature of the policy", least=0)]
    system: Annotated[str, Setting("", "the policy's system prompt in the futures")]
    overlong: Annotated[
        str | ReplyRule, Setting("score", "over-long replies are scored, missing, or get -1", choices=OVERLONG_RULES)
    ]
    max_reply_tokens: Annotated[int, Setting(0, "replies longer than this are over-long; 0: no limit", least=0)]
    user_options: Annotated[
        Mapping[str, Any], Setting({}, "persona, vagueness, task_description … of the simulated user")
    ]
    tokenizer: Annotated[Any, Setting(None, "tokenizer that counts tokens: a folder, a Hub name, or the object")]
    task: Annotated[str | Task | None, Setting(None, "the task whose verifier scores (metric 'verifier')")]
    sandbox: Annotated[Any, Setting("local", "where programs run: local, the URL of a server, or a `CodeRunner`")]
    budget: Annotated[Budget | None, Setting(None, "what the models may cost")]


FACTS = ("goal", "reference", "meta", "seed")
"""The settings that describe the row; the rest are settings of the scorer."""
