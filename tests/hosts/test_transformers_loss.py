"""The tiled loss inside causal language models of transformers."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rematic
from rematic.hosts.transformers_loss import use_tiled_loss
from rematic.memory import SimulatedProbe
from tests.hosts.language_models import (
    EXPERTS,
    GPT2,
    SIZES,
    assert_near,
    batch,
    build,
    llama,
    step,
)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {}),
    "gemma2-bounded": ("Gemma2", {"final_logit_softcapping": 2.0}),
    "gemma3-unbounded": ("Gemma3Text", {}),
    "gpt2": ("GPT2", GPT2),
    "mixtral-router-loss": ("Mixtral", EXPERTS),
    "cohere-factor": ("Cohere", {"logit_scale": 0.25}),
    "granite-divisor": ("Granite", {"logits_scaling": 4.0}),
    "phi-bias": ("Phi", {}),
    "bert-decoder": ("Bert", {"is_decoder": True}),
}


@pytest.mark.parametrize(("name", "changes"), FAMILIES.values(), ids=FAMILIES.keys())
def test_loss_and_gradients_of_every_family(name: str, changes: dict[str, Any]) -> None:
    model = build(name, **changes)
    plain = step(model)
    state, names = list(model.state_dict()), [n for n, _ in model.named_modules()]
    switch = use_tiled_loss(model, tile_tokens=4)
    tiled = step(model)
    assert_near(tiled, plain)
    assert switch.num_losses == 1
    assert tiled[0].logits is None
    assert [key for key in plain[0] if key != "logits"] == list(tiled[0])
    if "router_logits" in plain[0]:
        assert torch.equal(tiled[0].aux_loss, plain[0].aux_loss)
        assert tiled[0].aux_loss > 0
    assert list(model.state_dict()) == state
    assert [n for n, _ in model.named_modules()] == names


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_remove_restores_the_model_byte_for_byte(name: str) -> None:
    model = build(name, **(GPT2 if name == "GPT2" else {}))
    before = {n: dict(m.__dict__) for n, m in model.named_modules()}
    plain = step(model)
    switch = use_tiled_loss(model)
    step(model)
    switch.remove()
    switch.remove()
    after = {n: m.__dict__ for n, m in model.named_modules()}
    assert {n: d.keys() for n, d in after.items()} == {n: d.keys() for n, d in before.items()}
    assert all(after[n][k] is v for n, d in before.items() for k, v in d.items())
    output, gradients = step(model)
    assert torch.equal(output.loss, plain[0].loss)
    assert torch.equal(output.logits, plain[0].logits)
    assert all(torch.equal(gradients[n], g) for n, g in plain[1].items())
    use_tiled_loss(model).remove()


def test_a_loss_function_set_before_is_put_back() -> None:
    model = llama()
    model.loss_function = model.loss_function
    before = model.__dict__["_loss_function"]
    use_tiled_loss(model).remove()
    assert model.__dict__["_loss_function"] is before


def test_an_exception_in_forward_leaves_no_trace() -> None:
    model = llama()
    switch = use_tiled_loss(model)
    with pytest.raises(ValueError, match=r"labels have the shape \(2, 3\)"):
        model(input_ids=batch()["input_ids"], labels=torch.zeros(2, 3, dtype=torch.int64))
    assert type(model(input_ids=batch()["input_ids"]).logits) is torch.Tensor
    switch.remove()
    assert "forward" not in model.__dict__
    assert "forward" not in model.lm_head.__dict__


def test_evaluation_and_calls_without_labels_are_plain() -> None:
    model = llama()
    plain = model(**batch())
    switch = use_tiled_loss(model)
    assert torch.equal(model(input_ids=batch()["input_ids"]).logits, plain.logits)
    model.eval()
    found = model(**batch())
    assert torch.equal(found.logits, plain.logits)
    assert torch.equal(found.loss, plain.loss)
    assert model.generate(batch()["input_ids"], max_new_tokens=2).shape == (2, 11)
    assert switch.num_losses == 0
    model.train()
    assert model(**batch()).logits is None
    assert torch.equal(model(input_ids=batch()["input_ids"]).logits, plain.logits)


def test_outputs_that_are_tuples_keep_their_places() -> None:
    model = llama()
    plain = model(**batch(), return_dict=False)
    use_tiled_loss(model)
    found = model(**batch(), return_dict=False)
    assert len(found) == len(plain)
    assert found[0].item() == pytest.approx(plain[0].item(), rel=1e-6)
    assert found[1] is None


@pytest.mark.parametrize(
    "more",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"shift_labels": torch.roll(batch()["labels"], -1, 1)},
        {"ignore_index": 5},
        {"output_hidden_states": True},
    ],
    ids=["items", "items in a tensor", "shifted labels", "ignore index", "hidden states"],
)
def test_arguments_of_the_loss(more: dict[str, Any]) -> None:
    model = llama()
    data = batch()
    if "ignore_index" in more:
        data["labels"] = data["labels"].masked_fill(data["labels"] < 0, 5)

    def run() -> Any:
        model.zero_grad()
        output = model(**data, **more)
        output.loss.backward()
        return output, {n: p.grad for n, p in model.named_parameters()}

    plain = run()
    use_tiled_loss(model, tile_tokens=4)
    assert_near(run(), plain)


def test_labels_given_by_position() -> None:
    model = llama()
    plain = model(**batch()).loss.item()
    names = list(inspect.signature(model.forward).parameters)
    args: list[Any] = [None] * names.index("labels")
    args[0] = batch()["input_ids"]
    use_tiled_loss(model)
    output = model(*args, batch()["labels"])
    assert output.loss.item() == pytest.approx(plain, rel=1e-6)
    assert output.logits is None


def test_under_autocast() -> None:
    model = llama()
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(**batch())
        plain.loss.backward()
        wanted = {n: p.grad for n, p in model.named_parameters()}
        model.zero_grad()
        use_tiled_loss(model, tile_tokens=4)
        output = model(**batch())
    output.loss.backward()
    assert_near(
        (output, {n: p.grad for n, p in model.named_parameters()}), (plain, wanted), limit=2e-2
    )


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_plain(make_copy: Callable[[nn.Module], nn.Module]) -> None:
    model = llama()
    use_tiled_loss(model)
    copied = make_copy(model)
    nn.init.zeros_(copied.lm_head.weight)
    output = copied(**batch())
    assert output.logits.abs().max() == 0.0
    assert model(**batch()).logits is None


def test_hosts_still_see_the_names_of_the_arguments() -> None:
    model, plain = llama(), inspect.signature(llama().forward)
    use_tiled_loss(model)
    assert inspect.signature(model.forward) == plain


# --- around the model -----------------------------------------------------------------------------

# peft 0.21 reads it from a transformers that has deprecated it
of_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "head saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@of_peft
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS.keys())
def test_peft(options: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, **options))
    plain = step(model)
    switch = use_tiled_loss(model, tile_tokens=4)
    assert switch.name == "base_model.model"
    assert_near(step(model), plain)
    assert switch.num_losses == 1
    switch.remove()
    assert torch.equal(step(model)[0].loss, plain[0].loss)


@of_peft
def test_dropout_in_the_head_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], lora_dropout=0.1)
    with caplog.at_level(logging.WARNING, "rematic"):
        use_tiled_loss(peft.get_peft_model(llama(), config))
    assert "the head has dropout: in tiles it draws other random numbers" in caplog.text


def test_a_module_around_the_model() -> None:
    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = llama()

        def forward(self, **data: torch.Tensor) -> Any:
            return self.language_model(**data)

    task = Task()
    plain = step(task)
    assert use_tiled_loss(task, tile_tokens=4).name == "language_model"
    assert_near(step(task), plain)


def test_an_attached_model_has_the_bits_of_the_tiled_one() -> None:
    model = llama(num_hidden_layers=4)
    switch = use_tiled_loss(model, tile_tokens=4)
    plain, gradients = step(model)
    session = rematic.attach(model, budget="1GiB", policy="recompute")
    with session.step(batch()):
        output, recomputed = step(model)
    session.detach()
    assert torch.equal(output.loss, plain.loss)
    assert all(torch.equal(recomputed[n], g) for n, g in gradients.items())
    switch.remove()


def test_the_logits_never_exist() -> None:
    """Case F17: a large vocabulary above blocks that hold less than a hundredth of it."""
    vocabulary, length, tile_tokens = 32_000, 256, 16
    ids = torch.randint(3, vocabulary, (1, length))
    peaks = []
    for tiled in (False, True):
        model = llama(vocab_size=vocabulary, tie_word_embeddings=True)
        if tiled:
            use_tiled_loss(model, tile_tokens=tile_tokens)
        probe = SimulatedProbe()
        probe.track(model.parameters())
        before = probe.allocated_bytes()
        with probe:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        peaks.append(probe.peak_allocated_bytes - before)
    row = vocabulary * 4
    # the gradient of the tied weight: of the head, of the embedding
    others = 2 * vocabulary * SIZES["hidden_size"] * 4 + (1 << 20)
    assert peaks[0] >= 2 * length * row
    assert peaks[1] <= tile_tokens * row + others
