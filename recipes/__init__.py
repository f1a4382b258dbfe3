"""Recipes: schema, loader and the YAML files that ship with the package."""

from rematic.recipes.budget import Budget as Budget
from rematic.recipes.budget import parse_budget as parse_budget
from rematic.recipes.describe import format_recipe as format_recipe
from rematic.recipes.describe import recipe_as_plain as recipe_as_plain
from rematic.recipes.errors import RecipeError as RecipeError
from rematic.recipes.from_config import recipe_from_config as recipe_from_config
from rematic.recipes.loader import load_recipe as load_recipe
from rematic.recipes.loader import load_recipe_with_origins as load_recipe_with_origins
from rematic.recipes.recipe_files import list_recipes as list_recipes
from rematic.recipes.schema import ActionConfig as ActionConfig
from rematic.recipes.schema import CompressConfig as CompressConfig
from rematic.recipes.schema import ControlConfig as ControlConfig
from rematic.recipes.schema import DataConfig as DataConfig
from rematic.recipes.schema import KeepConfig as KeepConfig
from rematic.recipes.schema import MemoryConfig as MemoryConfig
from rematic.recipes.schema import ModelConfig as ModelConfig
from rematic.recipes.schema import OffloadConfig as OffloadConfig
from rematic.recipes.schema import PolicyConfig as PolicyConfig
from rematic.recipes.schema import Recipe as Recipe
from rematic.recipes.schema import RecomputeConfig as RecomputeConfig
from rematic.recipes.schema import RecomputeOffloadConfig as RecomputeOffloadConfig
from rematic.recipes.schema import RuleConfig as RuleConfig
from rematic.recipes.schema import RunConfig as RunConfig
from rematic.recipes.schema import SelectiveConfig as SelectiveConfig
from rematic.recipes.schema import TrainingConfig as TrainingConfig
from rematic.recipes.tree import Origin as Origin
