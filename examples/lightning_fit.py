"""The plain loop as a LightningModule; rematic is the lines marked #.

Run:  python examples/lightning_fit.py

Measured on nothing larger than a CPU. On several devices take RecomputeDDPStrategy.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import rematic  #


class Model(pl.LightningModule):
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

    def training_step(self, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Returns the loss of one document."""
        loss = cross_entropy(self(ids)[0, :-1], ids[0, 1:])
        self.print(f"{batch_idx}: {ids.shape[1]} tokens, loss {loss:.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


def documents(longest: int) -> list[torch.Tensor]:
    """Makes token ids (1, seq): six short documents and two long ones."""
    generator = torch.Generator().manual_seed(0)
    lengths = [longest if i % 4 == 3 else longest // 8 for i in range(8)]
    return [torch.randint(256, (1, length), generator=generator) for length in lengths]


def main() -> None:
    """Trains, and prints what rematic did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--longest", type=int, default=1024)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    strategy = rematic.RecomputeStrategy(budget="2GiB")  #
    trainer = pl.Trainer(
        strategy=strategy,  #
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), DataLoader(documents(arguments.longest), batch_size=None))
    print(strategy.session.report())  #


if __name__ == "__main__":
    main()
