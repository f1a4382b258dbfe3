from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from rematic.cost import TraceSettings, language_model_batch, trace_profile
from rematic.cost.real_twins import RealTwins
from rematic.cost.shape_cache import ShapeCache
from rematic.cost.torch_private import FakeTensorMode

aten = torch.ops.aten
OPS = {
    "new": lambda x: torch.mm(x, x),
    "view": lambda x: x.t()[1:, 2:],
    "several views": lambda x: x.split(2, dim=0),
    "in place": lambda x: x.clone().mul_(2),
    "several new": lambda x: torch.native_layer_norm(x, (8,), None, None, 1e-5),
    "one is None": lambda x: aten.convolution_backward(
        x.view(1, 1, 8, 8), x.view(1, 1, 8, 8), x.new_empty(1, 1, 3, 3), None,
        (1, 1), (1, 1), (1, 1), False, (0, 0), 1, (True, True, False),
    ),
    "a list": lambda x: torch.cat([x, x, x[:1]]),
    "into a slice": lambda x: x[2:4].copy_(x[:2]),
    "transposed": lambda x: torch.empty_like(x.t()),
    "by dtype": lambda x: (x > 0).to(torch.bfloat16),
}  # fmt: skip


def described(output, given):
    known = {id(given.untyped_storage()): "given"}
    return [
        (tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.untyped_storage().nbytes(),
         known.setdefault(id(t.untyped_storage()), len(known)))
        for t in tree_leaves(output)
        if isinstance(t, torch.Tensor)
    ]  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_what_is_remembered_is_what_the_op_returns(op):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        x = torch.empty(8, 8)
        plain = described(OPS[op](x), x)
        with RealTwins(mode) as twins:
            first, first_again = described(OPS[op](x), x), described(OPS[op](x), x)
            assert twins._cache._known
            num_known = len(twins._cache._known)
            again = described(OPS[op](x), x)
            assert len(twins._cache._known) == num_known
            other = torch.empty(8, 8, dtype=torch.float64)
            assert described(OPS[op](other), other)  # is another entry, not an error
    assert first == first_again == again == plain


def test_what_depends_on_more_than_shapes_is_not_remembered():
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, RealTwins(mode) as twins:
        x = torch.empty(4, 4)
        known = len(twins._cache._known)
        x.unsqueeze_(0)
        x.squeeze_(0)
        torch.view_as_complex(torch.empty(4, 2)).conj().mul(2)
    kept = [key[0] for key in twins._cache._known][known:]
    assert not any("squeeze_" in str(op) or "conj" in str(op) for op in kept)


def test_a_profile_is_the_same_with_and_without():
    settings = TraceSettings(make_batch=language_model_batch, batch=1, padded=(True,))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=3, **sizes)).train()
    remembered = trace_profile(model, settings)
    uncached = mock.patch.object(
        ShapeCache, "call", lambda _, op, args, kwargs, __: op(*args, **kwargs)
    )
    with uncached:
        assert trace_profile(model, settings) == remembered
