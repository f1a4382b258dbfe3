from __future__ import annotations

import pytest

from rematic.recipes import QuantizationConfig, TuningConfig
from tests.recipes.refusals import assert_refused

_NO_ADAPTER = (
    "expected nothing, since method is full and there is no adapter; remove it, or write"
    " method: lora"
)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"method": "lore"},
            "method is 'lore'; expected one of full, lora, dora, qlora; write full for all weights",
        ),
        (
            {"method": "lora", "r": 0},
            "r is 0; expected a whole number of at least 1; write for example 16",
        ),
        (
            {"method": "lora", "targets": ()},
            "targets is (); expected names of layers, or all-linear alone; write [all-linear] where"
            " unsure",
        ),
        (
            {"method": "lora", "targets": ("all-linear", "q_proj")},
            "targets is ('all-linear', 'q_proj'); expected names of layers, or all-linear alone;"
            " write [all-linear] where unsure",
        ),
        (
            {"method": "lora", "dropout": 1.0},
            "dropout is 1.0; expected a number of at least 0 and below 1; write 0 for none",
        ),
        ({"r": 8}, f"r is 8; {_NO_ADAPTER}"),
        ({"alpha": 8.0}, f"alpha is 8.0; {_NO_ADAPTER}"),
        ({"dropout": 0.1}, f"dropout is 0.1; {_NO_ADAPTER}"),
        ({"targets": ("q",)}, f"targets is ('q',); {_NO_ADAPTER}"),
        ({"modules_to_save": ("q",)}, f"modules_to_save is ('q',); {_NO_ADAPTER}"),
        ({"rslora": True}, f"rslora is true; {_NO_ADAPTER}"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused_tuning(values: dict[str, object], message: str) -> None:
    assert_refused(TuningConfig, values, message=message)


def test_the_format_follows_the_method_unless_it_is_said() -> None:
    auto = QuantizationConfig()
    assert [auto.resolved(method) for method in ("full", "lora", "dora", "qlora")] == [
        "none",
        "none",
        "none",
        "nf4",
    ]
    assert QuantizationConfig(format="int8").resolved("lora") == "int8"
    assert QuantizationConfig(format="fp4").resolved("qlora") == "fp4"
