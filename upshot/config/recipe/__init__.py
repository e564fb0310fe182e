"""The recipe: what a YAML file may say, a file a section. Loading, `extends` and overrides are in `config/load.py`."""

from upshot.config.recipe.base import Named, Section, Text
from upshot.config.recipe.episode import AgentConfig, CreditConfig, FuturesConfig
from upshot.config.recipe.model import LoraConfig, PolicyConfig, TinyConfig
from upshot.config.recipe.recipe import EvalConfig, Recipe
from upshot.config.recipe.reward import MetricConfig
from upshot.config.recipe.train import ImportanceConfig, KTOConfig, ScheduleConfig, TrainConfig

__all__ = [
    "AgentConfig",
    "CreditConfig",
    "EvalConfig",
    "FuturesConfig",
    "ImportanceConfig",
    "KTOConfig",
    "LoraConfig",
    "MetricConfig",
    "Named",
    "PolicyConfig",
    "Recipe",
    "ScheduleConfig",
    "Section",
    "Text",
    "TinyConfig",
    "TrainConfig",
]
