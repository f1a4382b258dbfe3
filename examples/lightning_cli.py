"""The LightningModule behind a LightningCLI; rematic is in the YAML file.

Run:  python examples/lightning_cli.py fit --config examples/lightning_cli.yaml
      python examples/lightning_cli.py fit --config examples/lightning_cli.yaml \
          --trainer.strategy.policy recompute --model.longest 4096

Measured on nothing larger than a CPU. Needs `jsonargparse[signatures]`.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Model(pl.LightningModule):
    """A causal language model: token ids (batch, seq) to logits (batch, seq, 256)."""

    def __init__(self, longest: int = 1024) -> None:
        super().__init__()
        self.documents = documents(longest)
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

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """Returns the documents, one a batch."""
        return DataLoader(self.documents, batch_size=None)


def documents(longest: int) -> list[torch.Tensor]:
    """Makes token ids (1, seq): six short documents and two long ones."""
    generator = torch.Generator().manual_seed(0)
    lengths = [longest if i % 4 == 3 else longest // 8 for i in range(8)]
    return [torch.randint(256, (1, length), generator=generator) for length in lengths]


if __name__ == "__main__":
    LightningCLI(Model, save_config_callback=None, seed_everything_default=0)
