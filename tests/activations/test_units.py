"""Which modules become units."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rematic.activations import find_units
from tests.activations.blocks import Block, Model
from tests.activations.families import ENCODER, GPT2, LLAMA_SDPA


def _transformer() -> nn.Module:
    return nn.Transformer(8, 2, 2, 3, 16, batch_first=True)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=11,
            d_model=8,
            d_kv=4,
            d_ff=16,
            num_layers=2,
            num_decoder_layers=3,
            num_heads=2,
            pad_token_id=0,
            decoder_start_token_id=0,
        )
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=8,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=8,
            patch_size=4,
        )
    )


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert() for _ in range(3)])


class Towers(nn.Module):
    """Two stacks, one of them reached by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.text = Model(depth=2)
        self.image = Model(Mixture, depth=2)
        self.again = nn.ModuleDict({"text": self.text})
        self.third = nn.Module()
        self.third.blocks = self.text.blocks


class Mixed(nn.Module):
    """One stack whose blocks are of two classes, with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), nn.ReLU(), Mixture(), Block(), nn.Linear(8, 8))
        self.tail = nn.Sequential(Block(), Expert())  # nothing is repeated


class Nested(nn.Module):
    """A block that holds a block, as a layer holds its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Block()
        self.norm = nn.LayerNorm(8)


class Stage(nn.Module):
    """Blocks, and something small behind them."""

    def __init__(self, make_block: Callable[[], nn.Module], depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make_block() for _ in range(depth)])
        self.behind = nn.Linear(8, 8)


class Branches(nn.Module):
    """Mostly two blocks, but as much beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([Nested(), Nested()])
        self.attention = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


class GatedMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList([Nested() for _ in range(3)])


class Stages(nn.Module):
    def __init__(self, make_stage: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList([make_stage(depth) for depth in (2, 1, 3)])


def _albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertForMaskedLM

    return AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=11,
            embedding_size=8,
            hidden_size=8,
            num_attention_heads=2,
            intermediate_size=16,
        )
    )


def _pairs() -> nn.Module:
    """Lists of a list, which are never called themselves."""
    layers = nn.ModuleList(nn.ModuleList([Block(), Mixture()]) for _ in range(2))
    return nn.ModuleDict({"layers": layers, "head": nn.Linear(8, 8)})


FOUND: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "llama": (LLAMA_SDPA.build, [f"model.layers.{i}" for i in range(3)]),
    "gpt2": (GPT2.build, [f"transformer.h.{i}" for i in range(3)]),
    "nn.TransformerEncoder": (ENCODER.build, [f"encoder.layers.{i}" for i in range(3)]),
    "nn.Transformer": (
        _transformer,
        [f"encoder.layers.{i}" for i in range(2)] + [f"decoder.layers.{i}" for i in range(3)],
    ),
    "t5": (
        _t5,
        [f"encoder.block.{i}" for i in range(2)] + [f"decoder.block.{i}" for i in range(3)],
    ),
    "vit": (_vit, [f"vit.layers.{i}" for i in range(3)]),
    "experts belong to their block": (lambda: Model(Mixture, 2), ["blocks.0", "blocks.1"]),
    "towers, one of them shared": (
        Towers,
        ["text.blocks.0", "text.blocks.1", "image.blocks.0", "image.blocks.1"],
    ),
    "lists of a list": (
        _pairs,
        ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"],
    ),
    "stages give way to their blocks": (
        lambda: Stages(lambda depth: Stage(Nested, depth)),
        ["stages.0.blocks.0", "stages.0.blocks.1", "stages.1"]
        + [f"stages.2.blocks.{i}" for i in range(3)],
    ),
    "stages of flat blocks stay": (
        lambda: Stages(lambda depth: Stage(Block, depth)),
        ["stages.0", "stages.1", "stages.2"],
    ),
    "blocks with branches stay": (lambda: Model(Branches, 2), ["blocks.0", "blocks.1"]),
    "experts beside their router": (lambda: Model(GatedMixture, 2), ["blocks.0", "blocks.1"]),
    "albert, one layer that runs several times": (
        _albert,
        ["albert.encoder.albert_layer_groups.0"],
    ),
    "a single block": (lambda: Model(depth=1), ["blocks.0"]),
    "two classes in one stack": (Mixed, ["body.0", "body.2", "body.3"]),
}


@pytest.mark.parametrize(("build", "names"), FOUND.values(), ids=FOUND.keys())
def test_the_blocks_of_every_repeated_stack_are_found(
    build: Callable[[], nn.Module], names: list[str]
) -> None:
    model = build()
    found = find_units(model)
    assert [name for name, _ in found] == names
    assert all(model.get_submodule(name) is module for name, module in found)


def test_a_stack_that_is_the_model_itself_is_found() -> None:
    assert [name for name, _ in find_units(nn.Sequential(Block(), Block()))] == ["0", "1"]


PATTERNS: dict[str, tuple[list[str], list[str]]] = {
    "one name": (["blocks.1"], ["blocks.1"]),
    "glob": (["blocks.[02]"], ["blocks.0", "blocks.2"]),
    "class name": (["Block"], ["blocks.0", "blocks.1", "blocks.2"]),
    "inside blocks": (["*.up"], ["blocks.0.up", "blocks.1.up", "blocks.2.up"]),
    "outermost of an overlap": (["*.up", "blocks.1"], ["blocks.0.up", "blocks.1", "blocks.2.up"]),
    "order of the model": (["head", "blocks.2", "blocks.0"], ["blocks.0", "blocks.2", "head"]),
    "twice": (["blocks.0", "Block"], ["blocks.0", "blocks.1", "blocks.2"]),
}


@pytest.mark.parametrize(("patterns", "names"), PATTERNS.values(), ids=PATTERNS.keys())
def test_patterns_name_other_units(patterns: list[str], names: list[str]) -> None:
    assert [name for name, _ in find_units(Model(), patterns)] == names


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    message = (
        "pattern 'block.*' matches none of the 11 modules: expected a glob over qualified names or "
        "a class name. Near: "
    )
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        find_units(Model(), ["blocks.0", "block.*"])
    assert "blocks" in str(caught.value)


NOTHING: dict[str, Any] = {
    "no stack": lambda: nn.Linear(4, 4),
    "layers without children": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
    "a single block that is no list's": lambda: nn.Sequential(Block(), nn.Linear(8, 8)),
    "blocks without parameters": lambda: nn.Sequential(
        nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())
    ),
}


@pytest.mark.parametrize("build", NOTHING.values(), ids=NOTHING.keys())
def test_a_model_without_a_repeated_stack_is_refused(build: Callable[[], nn.Module]) -> None:
    model = build()
    message = (
        f"found no stack of blocks in {type(model).__name__}: expected a ModuleList or Sequential "
        "of modules that hold others. Name the units in the recipe, for example `policy: {units: ["
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        find_units(model)


def test_finding_units_draws_no_random_number() -> None:
    model = Model()
    before = torch.get_rng_state()
    find_units(model)
    assert torch.equal(torch.get_rng_state(), before)
