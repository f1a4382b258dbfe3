"""The plain loop on several ranks under DDP; rematic is the lines marked #.

Run:  torchrun --nproc_per_node 2 examples/ddp_loop.py

Measured on nothing larger than a CPU. Attach before the wrapper; budgets are per device.
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import rematic  #


class Model(nn.Module):
    """A causal language model: token ids (batch, seq) to logits (batch, seq, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(64, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the next token at each position."""
        x = self.embedding(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def documents(longest: int) -> list[torch.Tensor]:
    """Makes token ids (1, seq): six short documents and two long ones."""
    generator = torch.Generator().manual_seed(0)
    lengths = [longest if i % 4 == 3 else longest // 8 for i in range(8)]
    return [torch.randint(256, (1, length), generator=generator) for length in lengths]


def main() -> None:
    """Trains, and prints what rematic did on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--longest", type=int, default=1024)
    arguments = parser.parse_args()

    distributed.init_process_group("gloo")
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    inner = Model()
    optimizer = torch.optim.AdamW(inner.parameters(), 1e-3)
    session = rematic.attach(inner, optimizer, budget="2GiB")  #
    model = DistributedDataParallel(inner)

    def forward_backward(ids: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model(ids)[0, :-1], ids[0, 1:])
        loss.backward()
        return loss.detach()

    for number, ids in enumerate(documents(arguments.longest)[rank::num_ranks]):
        loss = session.run(forward_backward, ids)  # instead of forward_backward(ids)
        optimizer.step()
        optimizer.zero_grad()
        print(f"{number}: {ids.shape[1]} tokens, loss {loss:.3f}")
    if rank == 0:
        print(session.report())  #
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
