from types import SimpleNamespace

import pytest
from torch import nn

from rematic.cost.windows import attention_windows


def model(**config):
    made = nn.Linear(2, 2)
    made.config = SimpleNamespace(**config)
    return made


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({}, []),
        ({"sliding_window": None}, []),
        ({"sliding_window": 4096}, [4096]),
        ({"sliding_window": 512, "attention_chunk_size": 256}, [256, 512]),
    ],
)
def test_windows_are_read_from_the_config(config, windows):
    assert attention_windows(model(**config)) == windows
