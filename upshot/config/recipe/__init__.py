"""The recipe: what a YAML file may say, a file a section. Loading, `extends` and overrides are in `config/load.py`."""

from upshot.config.recipe.base import Named, Section, Text
from upshot.config.recipe.policy import EngineConfig, LoraConfig, PolicyConfig, TinyConfig
from upshot.config.recipe.recipe import BudgetConfig, EvalConfig, Recipe, WarmStartConfig
from upshot.config.recipe.reward import MetricConfig, ReplyRuleConfig, RewardConfig
from upshot.config.recipe.rollout import AgentConfig, CreditConfig, EpisodeConfig, FuturesConfig
from upshot.config.recipe.train import (
    ClipConfig,
    DPOConfig,
    ImportanceConfig,
    KLConfig,
    OptimizerConfig,
    PPOConfig,
    SaveConfig,
    ScheduleConfig,
    TrainConfig,
)

__all__ = [
    "AgentConfig",
    "BudgetConfig",
    "ClipConfig",
    "CreditConfig",
    "DPOConfig",
    "EngineConfig",
    "EpisodeConfig",
    "EvalConfig",
    "FuturesConfig",
    "ImportanceConfig",
    "KLConfig",
    "LoraConfig",
    "MetricConfig",
    "Named",
    "OptimizerConfig",
    "PPOConfig",
    "PolicyConfig",
    "Recipe",
    "ReplyRuleConfig",
    "RewardConfig",
    "SaveConfig",
    "ScheduleConfig",
    "Section",
    "Text",
    "TinyConfig",
    "TrainConfig",
    "WarmStartConfig",
]
