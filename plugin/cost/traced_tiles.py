"""Runs the tiled loss of a fake model in a chosen number of slices, and shows the first of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from torch import nn

from rematic.activations import token_losses
from rematic.activations.tiled_loss import tokens_in_a_tile
from rematic.cost.tiling import SHOWN_TILES, Tiling


class TracedTiles:
    """The tiled loss of one model.

    Args:
        model: A copy that may be changed.
        tile_tokens: Tokens in a slice of the real step, None for the default.

    Raises:
        ValueError: As `rematic.use_tiled_loss`.
    """

    def __init__(self, model: nn.Module, *, tile_tokens: int | None) -> None:
        from rematic.hosts.transformers_loss import use_tiled_loss  # needs transformers

        self._switch = use_tiled_loss(model, tile_tokens=tile_tokens)
        head = dict(model.named_modules())[self._switch.name].get_output_embeddings()
        vocabulary = int(head.weight.shape[0])
        self.tiling = Tiling(
            tile_tokens=tokens_in_a_tile(1, vocabulary, tile_tokens=tile_tokens, num_tiles=None),
            vocabulary=vocabulary,
            is_trained=bool(head.weight.requires_grad),
        )
        self.repeated: tuple[int, int, int] | None = None
        """Where among the ops of forward the first slice begins, the second one, and where that
        ends."""

    @contextmanager
    def slicing(
        self,
        *,
        tokens: int,
        num_tiles: int,
        position: Callable[[], int],
        mute: Callable[[bool], None],
    ) -> Iterator[None]:
        """Slices the loss that runs in the body.

        Args:
            tokens: Batch size times length.
            num_tiles: Number of slices.
            position: Returns the number of ops of forward that were taken down.
            mute: Is told whether what comes is not to be taken down.
        """
        self._switch.tile_tokens = max(1, -(-tokens // num_tiles))
        self.repeated = None
        plain = token_losses._slices

        def shown(length: int, size: int) -> Iterator[slice]:
            starts: list[int] = []
            for i, part in enumerate(plain(length, size)):
                if i <= SHOWN_TILES:
                    starts.append(position())
                if i == SHOWN_TILES:
                    self.repeated = self.repeated or (starts[0], starts[1], starts[2])
                    mute(True)
                yield part
            mute(False)

        with mock.patch.object(token_losses, "_slices", shown):
            yield
