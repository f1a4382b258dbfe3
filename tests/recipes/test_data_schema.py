from __future__ import annotations

import pytest

from rematic.recipes import DataConfig, EvaluationConfig
from tests.recipes.refusals import assert_refused


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"subset": "en"},
            "subset is 'en'; expected null, since files have none; write format: datasets, or"
            " remove it",
        ),
        (
            {"split": "test"},
            "split is 'test'; expected null, since files have none; write format: datasets, or"
            " remove it",
        ),
        (
            {"messages_field": "messages", "target_field": "answer"},
            "messages_field is 'messages'; expected null, since target_field says where the answers"
            " are; remove one of the two",
        ),
        (
            {"text_field": "body", "messages_field": "chat"},
            "text_field is 'body'; expected nothing, since messages_field says where all that is"
            " said is; remove one of the two",
        ),
        (
            {"chat_template": "chat.jinja"},
            "chat_template is 'chat.jinja'; expected null, since no messages_field names"
            " conversations; remove it, or write messages_field",
        ),
        (
            {"answers_only": False},
            "answers_only is false; expected true, since plain text has no answers; remove it, or"
            " write messages_field or target_field",
        ),
        (
            {"labels": ("a", "b", "a"), "label_field": "class"},
            "labels is ('a', 'b', 'a'); expected two names or more, each once; write every class"
            " once, such as [negative, positive]",
        ),
        (
            {"labels": ("a",), "label_field": "class"},
            "labels is ('a',); expected two names or more, each once; write every class once, such"
            " as [negative, positive]",
        ),
        (
            {"labels": ("a", "b")},
            "labels is ('a', 'b'); expected none, since no label_field says which one a text has;"
            " remove it, or write label_field",
        ),
        (
            {"overlong": "truncate"},
            "overlong is 'truncate'; expected one of cut, split, skip, refuse; write cut where"
            " unsure",
        ),
        (
            {"order": "longest"},
            "order is 'longest'; expected one of shuffled, longest-first, written; write shuffled"
            " where unsure",
        ),
        (
            {"batch_size": 0},
            "batch_size is 0; expected a whole number of at least 1; write 1 for one sequence",
        ),
        (
            {"pad_to_multiple": 0},
            "pad_to_multiple is 0; expected a whole number of at least 1; write 1 for no padding",
        ),
        (
            {"mask_share": 1.5},
            "mask_share is 1.5; expected a number of at least 0 and below 1; write a share such as"
            " 0.15",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused_data(values: dict[str, object], message: str) -> None:
    assert_refused(DataConfig, values, message=message)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"source": "x.txt", "holdout": 0.1},
            "holdout is 0.1; expected 0, since source is 'x.txt'; remove one of the two",
        ),
        (
            {"every_steps": 5},
            "every_steps is 5; expected null, since there is nothing to evaluate on; write source"
            " or holdout",
        ),
        (
            {"holdout": 1.0},
            "holdout is 1.0; expected a number of at least 0 and below 1; write a share such as"
            " 0.05",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused_evaluation(values: dict[str, object], message: str) -> None:
    assert_refused(EvaluationConfig, values, message=message)
