"""The bytes that the planner derives for op sets are those of a traced step that keeps them."""

from rematic.cost import trace_recipe
from rematic.cost.devices import gpu_named
from rematic.cost.roofline import pace_of
from rematic.planner.frontier import listed_option
from rematic.policy import Keep, Recompute, Selective
from rematic.recipes import load_recipe

RECIPE = load_recipe(
    "tiny-cpu",
    [
        "model.config.num_hidden_layers=3",
        "model.config.hidden_size=64",
        "model.config.intermediate_size=160",
        "model.config.num_attention_heads=4",
        "model.config.num_key_value_heads=2",
    ],
)
SAVE = ("aten::mm[0]", "aten::mm[4]", "aten::silu[0]", "aten::cat[0]")
"""Some of it autograd saves as well, some it does not."""


def test_an_op_set_costs_what_a_trace_of_it_does():
    actions = (Keep(), Recompute(), Selective(save=SAVE))
    profile = trace_recipe(RECIPE, on_accelerator=False, actions=actions)
    for unit in profile.costs_at(batch=1, length=200).classes:
        traced = dict(unit.actions)["selective"]
        derived = listed_option(unit, pace_of(gpu_named("l4")), save=SAVE)
        assert derived.kept_bytes == traced.kept
        assert derived.forward_bytes == traced.forward
        assert derived.backward_bytes == traced.backward
        assert derived.gradient_bytes == traced.gradient
