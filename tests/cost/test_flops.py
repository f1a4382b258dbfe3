"""The operations of ops, at lengths far beyond those that were traced."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from rematic.cost import TraceSettings, trace_profile

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.up(x).view(*x.shape[:2], 2, -1).transpose(1, 2)
        h = F.scaled_dot_product_attention(heads, heads, heads)
        return x + h.transpose(1, 2).reshape(x.shape)


def test_operations_grow_with_the_square_where_bytes_do_not():
    settings = TraceSettings(
        loss=lambda model, batch: model(batch["x"]).sum(),
        make_batch=lambda batch, length, padded: {"x": torch.ones(batch, length, WIDTH)},
        batch=1,
        padded=(False,),
        on_accelerator=False,
    )
    profile = trace_profile(nn.Sequential(Block(), Block()), settings)
    for length in (48, 700, 5000):
        costs = profile.costs_at(batch=1, length=length)
        by_name = {op.name: op for op in costs.classes[0].ops}
        attention = by_name["aten::_scaled_dot_product_flash_attention_for_cpu"]
        assert attention.flops == 2 * 2 * WIDTH * length**2
        assert attention.result_bytes == (WIDTH + 2) * 4 * length
        with FlopCounterMode(display=False) as counter:
            Block().up(torch.ones(1, length, WIDTH))
        assert by_name["aten::addmm"].flops == counter.get_total_flops()
