"""The plain loop, in which a policy is changed for the long documents and taken back after them.

Run:  python examples/rollback_by_hand.py

Measured on nothing larger than a CPU. A running job takes the same by `rematic rollback`.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

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
    """Trains, and prints the policy of each step and those that are still on the stack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--longest", type=int, default=1024)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    session = rematic.attach(model, optimizer, policy="keep")

    for number, ids in enumerate(documents(arguments.longest)):
        is_long = ids.shape[1] == arguments.longest
        if is_long:
            session.switch("recompute", reason="a long document")
        with session.step(ids):
            loss = cross_entropy(model(ids)[0, :-1], ids[0, 1:])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{number}: {ids.shape[1]} tokens, loss {loss:.3f}")
        print(f"  under {session.policy.name}")
        if is_long:
            session.rollback(reason="it is over")
    for entry in session.history.entries:
        print(f"from step {entry.step}: {entry.policy.name}, {entry.reason}")


if __name__ == "__main__":
    main()
