from __future__ import annotations

from collections.abc import Callable

import pytest

from rematic.recipes import (
    AdafactorConfig,
    AdamWConfig,
    SGDConfig,
    TargetOptimizerConfig,
    TrainingConfig,
    load_recipe,
)
from tests.recipes.refusals import assert_refused


@pytest.mark.parametrize(
    ("schema_class", "values", "message"),
    [
        (
            AdamWConfig,
            {"name": "adam"},
            "name is 'adam'; expected one of adamw, adamw-8bit, paged-adamw, paged-adamw-8bit;"
            " write adamw where unsure",
        ),
        (
            AdamWConfig,
            {"betas": (0.9,)},
            "betas is (0.9,); expected two numbers of at least 0 and below 1; write [0.9, 0.999]",
        ),
        (
            AdafactorConfig,
            {"beta2_decay": 0.8},
            "beta2_decay is 0.8; expected a number below 0; write -0.8",
        ),
        (
            SGDConfig,
            {"nesterov": True},
            "nesterov is true; expected false, since momentum is 0; write momentum: 0.9",
        ),
        (
            TargetOptimizerConfig,
            {"_target_": "RMSprop"},
            "_target_ is 'RMSprop'; expected the import path of a class; write for example"
            " torch.optim.RMSprop",
        ),
        (
            TargetOptimizerConfig,
            {"_target_": "torch.optim.AdamW", "options": {"weight_decay": 0.5}},
            "options is {'weight_decay': 0.5}; expected none of lr, params, weight_decay, which are"
            " not options; write training.learning_rate and training.weight_decay",
        ),
        (
            TrainingConfig,
            {"learning_rate": 1e300},
            "learning_rate is 1e+300; expected a finite number above 0 and below 2**128, as 32 bits"
            " hold it; write for example 3.0e-4",
        ),
        (
            TrainingConfig,
            {"weight_decay": 1e39},
            "weight_decay is 1e+39; expected a finite number of at least 0 and below 2**128, as 32"
            " bits hold it; write 0 for none",
        ),
        (
            TrainingConfig,
            {"accumulate": 2**63},
            "accumulate is 9223372036854775808; expected a whole number from 1 to"
            " 9223372036854775807; write 1 for a step after each micro-batch",
        ),
        (
            TrainingConfig,
            {"final_share": 0.1},
            "final_share is 0.1; expected 0, since the schedule is constant; write schedule:"
            " cosine, or remove it",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused(
    schema_class: Callable[..., object], values: dict[str, object], message: str
) -> None:
    assert_refused(schema_class, values, message=message)


@pytest.mark.parametrize(
    ("written", "optimizer"),
    [
        ("paged-adamw-8bit", AdamWConfig(name="paged-adamw-8bit")),
        ("{name: adamw-8bit, betas: [0, 0.95]}", AdamWConfig(name="adamw-8bit", betas=(0.0, 0.95))),
        ("adafactor", AdafactorConfig()),
        ("{name: sgd, momentum: 0.9, nesterov: true}", SGDConfig(momentum=0.9, nesterov=True)),
        (
            "{name: target, _target_: torch.optim.RMSprop, options: {alpha: 0.9}}",
            TargetOptimizerConfig(_target_="torch.optim.RMSprop", options={"alpha": 0.9}),
        ),
    ],
)
def test_an_optimizer_is_a_name_or_a_mapping(written: str, optimizer: object) -> None:
    recipe = load_recipe("auto", [f"training.optimizer={written}"])
    assert recipe.training.optimizer == optimizer
