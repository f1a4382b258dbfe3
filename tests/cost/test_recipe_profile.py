import pytest

from rematic.cost import trace_recipe
from rematic.recipes import Recipe, load_recipe
from rematic.training.model import build_empty_model
from rematic.training.model_size import size_of


def test_a_recipe_is_traced_without_weights():
    recipe = load_recipe("tiny-cpu", overrides=["model.config.num_hidden_layers=3"])
    profile = trace_recipe(recipe, on_accelerator=False, actions=())
    costs = profile.costs_at(batch=1, length=1024)
    size = size_of(build_empty_model(recipe.model, max_length=1024))
    assert costs.fixed.weights == size.weight_bytes
    scalars = 4 * 30  # each weight's count of steps
    assert 0 <= costs.fixed.optimizer - size.optimizer_bytes <= scalars
    assert profile.unit_names == tuple(f"model.layers.{i}" for i in range(3))
    assert [op.name for op in costs.around_ops if op.name == "aten::mm"] == ["aten::mm"]


def test_a_recipe_without_a_model_is_refused():
    with pytest.raises(ValueError, match="the recipe names no model"):
        trace_recipe(Recipe(), on_accelerator=True)
