"""The recipe: what a YAML file may say, a file a section. Loading, `extends` and overrides are in `config/load.py`."""

from upshot.config.recipe.base import Named as Named
from upshot.config.recipe.base import Section as Section
from upshot.config.recipe.base import Text as Text
from upshot.config.recipe.episode import AgentConfig as AgentConfig
from upshot.config.recipe.episode import CreditConfig as CreditConfig
from upshot.config.recipe.episode import FuturesConfig as FuturesConfig
from upshot.config.recipe.model import LoraConfig as LoraConfig
from upshot.config.recipe.model import PolicyConfig as PolicyConfig
from upshot.config.recipe.model import TinyConfig as TinyConfig
from upshot.config.recipe.recipe import EvalConfig as EvalConfig
from upshot.config.recipe.recipe import Recipe as Recipe
from upshot.config.recipe.reward import MetricConfig as MetricConfig
from upshot.config.recipe.train import ImportanceConfig as ImportanceConfig
from upshot.config.recipe.train import KTOConfig as KTOConfig
from upshot.config.recipe.train import ScheduleConfig as ScheduleConfig
from upshot.config.recipe.train import TrainConfig as TrainConfig
