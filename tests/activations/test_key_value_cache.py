"""Caches in training: filled as ever, and once; a unit that goes on from one is kept (C2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rematic.activations import Engine
from rematic.activations.key_value_cache import CacheBefore, CachesOfCall
from rematic.activations.unit_forward import is_recording
from rematic.policy import Keep, Plan, Recompute, Selective
from tests.activations.families import build_llama
from tests.activations.parity import Outcome, attached, differences, read_outcome, same_bits

MASK = torch.tensor([[1] * 16, [0] * 5 + [1] * 11])


def gpt2(attention: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=11, n_embd=32, n_layer=2, n_head=4, attn_implementation=attention)
    )


def t5(attention: str) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=11,
        d_model=32,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        attn_implementation=attention,
    )
    return T5ForConditionalGeneration(config)


def llama(attention: str) -> Any:
    return build_llama(attention, hidden_size=32, num_attention_heads=4)


def sliding(attention: str) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=11,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        attn_implementation=attention,
    )
    return Gemma3ForCausalLM(config)


MODELS = {"gpt2": gpt2, "t5": t5, "llama": llama, "gemma3": sliding}
ACTIONS = (Recompute(), Selective(), Keep())


def made(build: Any, attention: str) -> Any:
    torch.manual_seed(0)
    return build(attention).train()


def ids(length: int = 16) -> torch.Tensor:
    return torch.arange(2 * length).view(2, length) * 7 % 11


def step(model: Any, mask: torch.Tensor | None, evict: Any = lambda: None) -> Any:
    """Returns the outcome, and what is in the cache that the model returns."""
    torch.manual_seed(4)
    output = model(input_ids=ids(), attention_mask=mask, labels=ids())
    evict()
    output.loss.backward()
    return read_outcome(model, [output.loss]), list(_cached(output))


def _cached(output: Any) -> Any:
    cache = output.cache
    for part in (getattr(cache, "self_attention_cache", cache), cache):
        for layer in getattr(part, "layers", ()):
            yield from (layer.keys.detach().clone(), layer.values.detach().clone())


@pytest.mark.parametrize(
    ("attention", "mask"),
    [("eager", None), ("sdpa", None), ("sdpa", MASK)],
    ids=["eager", "sdpa", "sdpa, padded"],
)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
def test_case_c2_the_step_and_the_cache_are_those_of_the_plain_step(
    build: Any, attention: str, mask: torch.Tensor | None
) -> None:
    wanted, cached = step(made(build, attention), mask)
    assert cached
    for action in ACTIONS:
        model = made(build, attention)
        engine = Engine(model)
        engine.apply(Plan(actions=tuple(action for _ in engine.units)))
        for evict in (lambda: None, lambda: engine.ledger.evict(1 << 40)):  # noqa: B023
            model.zero_grad()
            found, found_cached = step(model, mask, evict)
            assert differences(found, wanted) == []
            assert all(map(same_bits, found_cached, cached))
        assert [unit.pinned for unit in engine.units] == [None] * len(engine.units)
        if not isinstance(action, Keep):
            assert engine.ledger.counts.replays.total() == 2 * len(engine.units)
        engine.detach()


def test_a_training_that_goes_on_from_a_cache_sees_what_the_model_left_there() -> None:
    def chunks(model: Any) -> Outcome:
        first = model(input_ids=ids(), labels=ids())
        second = model(input_ids=ids(4), labels=ids(4), cache=first.cache)
        (first.loss + second.loss).backward()
        return read_outcome(model, [first.loss, second.loss])

    wanted = chunks(made(llama, "sdpa"))
    model = made(llama, "sdpa")
    with attached(model, kept=False) as engine:
        assert differences(chunks(model), wanted) == []
        assert engine.ledger.counts.replays.total() == 3, "the second part is kept"


def test_a_forward_that_runs_again_writes_its_cache_once() -> None:
    wanted = step(made(llama, "sdpa"), None)
    model = made(llama, "sdpa")
    failures: list[int] = []

    class Fails(TorchDispatchMode):
        num_ops = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.cat.default and is_recording():
                self.num_ops += 1
                if self.num_ops in (4, 9):
                    failures.append(self.num_ops)
                    raise torch.OutOfMemoryError("CUDA out of memory.")
            return result

    with attached(model, kept=True), Fails():
        found = step(model, None)
    assert failures == [4, 9]
    assert differences(found[0], wanted[0]) == []
    assert all(map(same_bits, found[1], wanted[1]))


class Cache:
    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self) -> int:
        return self.length

    def update(self, *_: Any) -> None:
        self.length += 1


def test_what_an_empty_cache_was_stands_for_it_and_a_filled_one_is_left() -> None:
    x, cache = torch.ones(1), Cache(0)
    caches = CachesOfCall(nn.Linear(1, 1), ((x, cache), {"past": cache, "other": 3}))
    args, kwargs = caches.for_record(((x, cache), {"past": cache, "other": 3}))
    assert args[0] is x
    assert args[1] is kwargs["past"]
    assert isinstance(args[1], CacheBefore)
    assert caches.are_written
    assert not caches.is_filled
    cache.update()
    assert [args[1].made_again().length, cache.length] == [0, 1]
    caches.restore()
    assert cache.length == 0
    call = ((Cache(0), Cache(4)), {"a": 1})
    filled = CachesOfCall(nn.Linear(1, 1), call)
    assert filled.for_record(call) is call
    assert filled.is_filled


class Layer:
    """A layer of a cache that knows the cache, whose settings know themselves."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.keys = cache, torch.ones(2)
        self.options: dict[str, Any] = {}
        self.options["options"] = self.options
        self.steps: list[Any] = [self.options]
        self.steps.append(self.steps)


def test_caches_may_point_back_to_themselves() -> None:
    cache: Any = Cache(0)
    cache.layers = [Layer(cache), Layer(cache)]
    call = ((cache,), {})
    caches = CachesOfCall(nn.Linear(1, 1), call)
    again: Any = caches.for_record(call)[0][0].made_again()
    assert [layer.cache is again for layer in again.layers] == [True, True]
    assert again is not cache
    first, own = again.layers[0], cache.layers[0]
    assert first.options["options"] is first.options is not own.options
    assert first.steps[1] is first.steps is not own.steps
    own.steps.append(3)
    own.options["other"] = cache.extra = 1
    caches.restore()
    assert own.steps == [own.options, own.steps]
    assert own.options.keys() == {"options"}
    assert not hasattr(cache, "extra")


def test_the_setting_of_the_model_is_left_alone_and_generation_uses_its_cache() -> None:
    """A model that trains under rematic generates as before, in between and after."""
    torch.manual_seed(0)
    model = build_llama("sdpa", bos_token_id=None, eos_token_id=None, pad_token_id=None)
    ids = torch.randint(0, 11, (1, 4))
    model.eval()
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert model.config.use_cache is True
    with attached(model, kept=False) as engine:
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        model.eval()
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted)
        assert engine.units[0].num_forwards == 1, "generation makes no record"
    assert model.config.use_cache is True
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted)
