"""Batches for the small models of `architecture_models.py`, by what a forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedConfig

Batch = dict[str, Any]
MakesBatch: TypeAlias = "Callable[[PreTrainedConfig, torch.Generator, bool], Batch]"
"""From the model's config, a generator, and whether padding is on the left."""
VOCABULARY = 120
LENGTH = 12
NUM_SAMPLES = 4000
"""Samples of a sound."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of batch."""

    needs: tuple[str, ...]
    """What the forward must take."""

    make: MakesBatch
    """Makes one."""


def kinds_for(model: nn.Module) -> Iterator[tuple[str, Kind]]:
    """Yields the kinds that a model may take, with their names, likeliest first."""
    taken = set(inspect.signature(model.forward).parameters)
    for name, kind in KINDS.items():
        if taken.issuperset(kind.needs):
            yield name, kind


def _ids(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(50, VOCABULARY - 5, (2, LENGTH), generator=generator)


def _text(config: PreTrainedConfig, generator: torch.Generator, left: bool) -> Batch:
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    third = LENGTH // 3
    mask[1, slice(None, third) if left else slice(-third, None)] = 0
    return {"input_ids": _ids(generator), "attention_mask": mask}


def _labelled_text(config: PreTrainedConfig, generator: torch.Generator, left: bool) -> Batch:
    batch = _text(config, generator, left)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {**batch, "labels": labels}


def _pairs(config: PreTrainedConfig, generator: torch.Generator, left: bool) -> Batch:
    return {**_text(config, generator, left), "decoder_input_ids": _ids(generator)}


def _captions(config: PreTrainedConfig, generator: torch.Generator, left: bool) -> Batch:
    return {**_text(config, generator, left), "pixel_values": _pixels(config, generator)}


def _image_size(config: PreTrainedConfig) -> tuple[int, int]:
    parts = ("vision_config", "backbone_config")
    for part in (config, *(getattr(config, name, None) for name in parts)):
        size = getattr(part, "image_size", None)
        if size is not None:
            return (size, size) if isinstance(size, int) else tuple(size)[:2]
    return 64, 64


def _pixels(config: PreTrainedConfig, generator: torch.Generator) -> torch.Tensor:
    vision = getattr(config, "vision_config", None) or config
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None)
    number = channels if isinstance(channels, int) else 3
    return torch.randn(2, number, *_image_size(config), generator=generator)


def _videos(config: PreTrainedConfig, generator: torch.Generator, left: bool) -> Batch:
    number = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", 4)
    return {"pixel_values": _pixels(config, generator)[:, None].repeat(1, number, 1, 1, 1)}


def _patches(name: str) -> MakesBatch:
    def make(config: PreTrainedConfig, generator: torch.Generator, left: bool) -> Batch:
        channels = getattr(config, "in_channels", None) or getattr(config, "num_channels", 3)
        temporal = getattr(config, "temporal_patch_size", None) or 1
        width = channels * temporal * config.patch_size**2
        grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
        return {name: torch.randn(48, width, generator=generator), "grid_thw": grid}

    return make


def _waves(*shape: int) -> MakesBatch:
    return lambda config, generator, left: {
        "input_values": torch.randn(*shape, generator=generator)
    }


_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_size", "feature_projection_input_dim")


def _features(*, channels_first: bool) -> MakesBatch:
    def make(config: PreTrainedConfig, generator: torch.Generator, left: bool) -> Batch:
        audio = getattr(config, "audio_config", None) or getattr(config, "encoder_config", config)
        found = [getattr(audio, name, None) for name in _BINS]
        bins = next((number for number in found if isinstance(number, int)), 80)
        frames = 2 * (getattr(audio, "max_source_positions", None) or 64)
        shape = (bins, frames) if channels_first else (frames, bins)
        return {"input_features": torch.randn(2, *shape, generator=generator)}

    return make


def _series(config: PreTrainedConfig, generator: torch.Generator, left: bool) -> Batch:
    shape = (getattr(config, "context_length", 64), getattr(config, "num_input_channels", 1))
    return {"past_values": torch.randn(2, *shape, generator=generator)}


def _hidden(name: str) -> MakesBatch:
    def make(config: PreTrainedConfig, generator: torch.Generator, left: bool) -> Batch:
        width = getattr(config.get_text_config(), "hidden_size", 32)
        return {name: torch.randn(2, LENGTH, width, generator=generator)}

    return make


def _images(config: PreTrainedConfig, generator: torch.Generator, left: bool) -> Batch:
    return {"pixel_values": _pixels(config, generator)}


def _with(make: Callable[..., Batch], **more: Any) -> MakesBatch:
    """Adds what is the same in every batch, or made by a generator."""

    def made(config: PreTrainedConfig, generator: torch.Generator, left: bool) -> Batch:
        values = {name: one(generator) if callable(one) else one for name, one in more.items()}
        return {**make(config, generator, left), **values}

    return made


_CLASSES = torch.tensor([0, 1])
_TRANSCRIPTS = torch.tensor([[1, 2], [3, 4]])
_SOUND_FIRST, _SOUND_LAST = _features(channels_first=True), _features(channels_first=False)
_WAVE = _waves(2, NUM_SAMPLES)
KINDS: dict[str, Kind] = {
    "contrast": Kind(
        needs=("input_ids", "attention_mask", "pixel_values", "return_loss"),
        make=_with(_captions, return_loss=True),
    ),
    "labelled text": Kind(needs=("input_ids", "attention_mask", "labels"), make=_labelled_text),
    "text": Kind(needs=("input_ids", "attention_mask"), make=_text),
    "text alone": Kind(
        needs=("input_ids",), make=lambda _, generator, left: {"input_ids": _ids(generator)}
    ),
    "pairs": Kind(needs=("input_ids", "attention_mask", "decoder_input_ids"), make=_pairs),
    "captions": Kind(needs=("input_ids", "attention_mask", "pixel_values"), make=_captions),
    "labelled images": Kind(needs=("pixel_values", "labels"), make=_with(_images, labels=_CLASSES)),
    "images": Kind(needs=("pixel_values",), make=_images),
    "videos": Kind(needs=("pixel_values",), make=_videos),
    "transcribed waves": Kind(
        needs=("input_values", "labels"), make=_with(_WAVE, labels=_TRANSCRIPTS)
    ),
    "labelled waves": Kind(needs=("input_values", "labels"), make=_with(_WAVE, labels=_CLASSES)),
    "waves": Kind(needs=("input_values",), make=_WAVE),
    "waves of one channel": Kind(needs=("input_values",), make=_waves(2, 1, NUM_SAMPLES)),
    "speech": Kind(needs=("input_features", "labels"), make=_with(_SOUND_FIRST, labels=_ids)),
    "speech, channels last": Kind(
        needs=("input_features", "labels"), make=_with(_SOUND_LAST, labels=_ids)
    ),
    "sound": Kind(needs=("input_features",), make=_SOUND_FIRST),
    "sound, channels last": Kind(needs=("input_features",), make=_SOUND_LAST),
    "series": Kind(needs=("past_values",), make=_series),
    "embeddings": Kind(needs=("inputs_embeds",), make=_hidden("inputs_embeds")),
    "patches": Kind(needs=("hidden_states", "grid_thw"), make=_patches("hidden_states")),
    "patches of pixels": Kind(needs=("pixel_values", "grid_thw"), make=_patches("pixel_values")),
    "hidden states": Kind(needs=("hidden_states",), make=_hidden("hidden_states")),
}
"""Every kind, by name."""
