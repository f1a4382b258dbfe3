"""Puts the tiled loss into a causal language model of transformers, for training."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch import nn

from rematic.activations.instance_forward import InstanceForward
from rematic.activations.tiled_loss import (
    refuse_sharded,
    tiled_cross_entropy,
    tiled_head_cross_entropy,
    tokens_in_a_tile,
)
from rematic.activations.token_losses import LossForm
from rematic.hosts.deferred_logits import DeferredLogits

_log = logging.getLogger("rematic")
_SHIFTED_LOSSES = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}
"""The losses of transformers that are known, and whether they shift the labels."""


_evaluation = threading.local()


@contextlib.contextmanager
def tiled_evaluation() -> Iterator[None]:
    """Lets models with a tiled loss tile it in evaluation mode too, inside this thread.

    Evaluation needs as little room as training then; its output has no logits either.
    """
    before = getattr(_evaluation, "is_tiled", False)
    _evaluation.is_tiled = True
    try:
        yield
    finally:
        _evaluation.is_tiled = before


def use_tiled_loss(model: nn.Module, *, tile_tokens: int | None = None) -> TiledLoss:
    """Lets a causal language model compute its loss by tiles while it trains.

    When the model is in training mode and is called with labels, its head is not run: the loss is
    computed by `tiled_cross_entropy` from the hidden states, and the `logits` of the output are
    None. In evaluation mode and without labels nothing changes. Everything else that the model's
    forward does (the router loss of mixtures of experts, a bound or factor on the logits,
    `num_items_in_batch`) is its own: only the head and `loss_function` are replaced, on the
    instance. Names, parameters and `state_dict` stay, and a copy of the model is plain.

    A head that is no plain linear layer (an adapter on it) is run in slices under
    `torch.utils.checkpoint`.

    Args:
        model: A causal language model of transformers, or something around one (PEFT, DDP, a
            LightningModule).
        tile_tokens: Tokens in a slice; by default as many as have 2**24 logits.

    Raises:
        ValueError: If there is no such model inside, its loss is computed elsewhere, or it has the
            switch already.
    """
    tokens_in_a_tile(1, 1, tile_tokens=tile_tokens, num_tiles=None)
    name, language_model = _find_language_model(model)
    return TiledLoss(name, language_model, tile_tokens=tile_tokens)


class TiledLoss:
    """The switch in place; `remove()` turns it back.

    Args:
        name: Qualified name of the language model in what the caller gave, "" for itself.
        model: The language model.
        tile_tokens: Tokens in a slice, None for the default.
    """

    def __init__(self, name: str, model: nn.Module, *, tile_tokens: int | None) -> None:
        self.name = name
        self.tile_tokens = tile_tokens
        self.num_losses = 0
        """Losses computed by tiles."""
        self._model = weakref.ref(model)
        self._state = threading.local()
        # Any: a PreTrainedModel, which is an import of transformers away
        host: Any = model
        self._loss = _LossFunction(self, host.loss_function)
        self._shifted = _shifted(self._loss.plain)
        self._had_loss_function = "_loss_function" in model.__dict__
        self._position_of_labels = _position_of_labels(model.forward)
        head = host.get_output_embeddings()
        self._head = weakref.ref(head)
        self._warn_about_random_numbers(head)
        self._forwards = (
            InstanceForward(head, self._around_head),
            InstanceForward(model, self._around_model),
        )
        host.loss_function = self._loss
        _log.info(
            "loss of %s: computed in tiles; in training its output has no logits",
            type(model).__name__,
        )

    def remove(self) -> None:
        """Restores the model; safe to call twice."""
        for forward in reversed(self._forwards):
            forward.remove()
        model = self._model()
        if model is None or model.__dict__.get("_loss_function") is not self._loss:
            return
        if self._had_loss_function:
            model.__dict__["_loss_function"] = self._loss.plain
        else:
            del model.__dict__["_loss_function"]

    def _around_model(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
        model, labels = self._model(), kwargs.get("labels")
        if labels is None and len(args) > self._position_of_labels:
            labels = args[self._position_of_labels]
        is_tiled = model is not None and (model.training or getattr(_evaluation, "is_tiled", False))
        if model is None or not is_tiled or labels is None:
            return forward(*args, **kwargs)
        before = self.num_losses
        with self._deferring():
            output = forward(*args, **kwargs)
        if self.num_losses == before:
            raise RuntimeError(
                f"{type(model).__name__} was given labels but did not ask its `loss_function` for "
                "the loss: another library has replaced its forward. Keep one of the two."
            )
        return _without_logits(output)

    @contextlib.contextmanager
    def _deferring(self) -> Iterator[None]:
        self._state.deferring = True
        try:
            yield
        finally:
            self._state.deferring = False

    def _around_head(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
        if not getattr(self._state, "deferring", False) or len(args) != 1 or kwargs:
            return forward(*args, **kwargs)
        hidden, head = args[0], self._head()
        assert head is not None, "it is being called"
        kind = hidden.device.type
        autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        return DeferredLogits(
            hidden=hidden,
            head=forward,
            shape=torch.Size((*hidden.shape[:-1], _num_classes(head))),
            dtype=torch.get_autocast_dtype(kind) if autocast else hidden.dtype,
        )

    def tile(
        self,
        logits: DeferredLogits,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **others: object,
    ) -> torch.Tensor:
        """Computes the loss that transformers would compute from the logits.

        Takes the arguments of transformers' losses, and ignores those that they ignore.
        """
        if vocab_size != logits.shape[-1]:
            raise ValueError(
                f"vocab_size is {vocab_size}, but the head has {logits.shape[-1]} rows: expected "
                "the same. Resize the model's embeddings by `resize_token_embeddings`."
            )
        self.num_losses += 1
        return _tiled_loss(
            self._head(),
            logits,
            labels if shift_labels is None else shift_labels.view(logits.shape[:-1]),
            shift=self._shifted and shift_labels is None,
            num_items=num_items_in_batch,
            ignore_index=ignore_index,
            tile_tokens=self.tile_tokens,
        )

    def _warn_about_random_numbers(self, head: nn.Module) -> None:
        if any(isinstance(part, nn.Dropout) and part.p > 0 for part in head.modules()):
            _log.warning(
                "the head has dropout: in tiles it draws other random numbers than without them"
            )


class _LossFunction:
    """The model's `loss_function`: tiles for logits that are deferred, the plain one for others.

    It copies and pickles into the plain one.
    """

    def __init__(self, switch: TiledLoss, plain: Callable[..., Any]) -> None:
        self.plain = plain
        self._switch = switch

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        logits = args[0] if args else kwargs.get("logits")
        if isinstance(logits, DeferredLogits):
            return self._switch.tile(*args, **kwargs)
        return self.plain(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return self.plain

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.plain,)


def _tiled_loss(
    head: nn.Module | None,
    logits: DeferredLogits,
    labels: torch.Tensor,
    *,
    shift: bool,
    num_items: torch.Tensor | int | None,
    ignore_index: int,
    tile_tokens: int | None,
) -> torch.Tensor:
    assert head is not None, "the model is being called"
    softcap = 1.0 if logits.under_tanh else logits.softcap
    if _is_plain(head, logits.head):
        return tiled_cross_entropy(
            logits.hidden,
            head.weight,
            labels,
            bias=head.bias,
            ignore_index=ignore_index,
            num_items=num_items,
            shift=shift,
            logit_scale=logits.scale,
            logit_softcap=softcap,
            tile_tokens=tile_tokens,
        )
    weight = head.weight
    if isinstance(weight, torch.Tensor):  # (PEFT's wrappers show that of the module inside)
        refuse_sharded(weight)
    return tiled_head_cross_entropy(
        logits.head,
        logits.hidden,
        labels,
        form=LossForm(scale=logits.scale, softcap=softcap, ignore_index=ignore_index),
        num_items=num_items,
        shift=shift,
        tile_tokens=tokens_in_a_tile(
            labels.numel(), logits.shape[-1], tile_tokens=tile_tokens, num_tiles=None
        ),
    )


def _find_language_model(model: nn.Module) -> tuple[str, nn.Module]:
    from transformers import PreTrainedModel

    for name, module in model.named_modules():
        # (untyped in transformers)
        if not isinstance(module, PreTrainedModel) or module.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
            continue
        if not _asks_for_its_loss(type(module)):
            raise ValueError(
                f"{type(module).__name__} computes its loss inside its forward: expected a model "
                "that asks `self.loss_function` for it, as causal language models do"
            )
        if isinstance(module.loss_function, _LossFunction):
            raise ValueError(
                f"{type(module).__name__} has a tiled loss already: expected one switch at a time. "
                "Call remove() on the first."
            )
        return name, module
    raise ValueError(
        f"found no language model of transformers with a head in {type(model).__name__}: expected "
        "one, such as LlamaForCausalLM, or a module around one. For a model of your own, call "
        "`tiled_cross_entropy` where it computes its loss."
    )


def _asks_for_its_loss(kind: type) -> bool:
    forwards = (vars(base).get("forward") for base in kind.__mro__)
    codes = (getattr(inspect.unwrap(f), "__code__", None) for f in forwards if callable(f))
    return any("loss_function" in code.co_names for code in codes if code is not None)


def _shifted(loss: Callable[..., Any]) -> bool:
    name = getattr(loss, "__name__", type(loss).__name__)
    if name not in _SHIFTED_LOSSES or not loss.__module__.startswith("transformers."):
        raise ValueError(
            f"the model's loss_function is {name}: expected one of {list(_SHIFTED_LOSSES)} of "
            "transformers. Call `tiled_cross_entropy` inside your own loss instead."
        )
    return _SHIFTED_LOSSES[name]


def _position_of_labels(forward: Callable[..., Any]) -> int:
    names = list(inspect.signature(forward).parameters)
    return names.index("labels") if "labels" in names else len(names)


def _is_plain(head: nn.Module, forward: Callable[..., Any]) -> TypeGuard[nn.Linear]:
    # forward: what head.forward was before it was replaced here
    # (a class that FSDP or a parametrization derives from Linear still runs Linear's forward)
    return isinstance(head, nn.Linear) and getattr(forward, "__func__", None) is nn.Linear.forward


def _num_classes(head: Any) -> int:  # noqa: ANN401 - modules show attributes as a union
    # A 4-bit weight is packed, a wrapper (PEFT) may show the weight alone.
    found = getattr(head, "out_features", None)
    return int(len(head.weight) if found is None else found)


def _without_logits(output: object) -> object:
    if isinstance(output, tuple):
        return tuple(None if isinstance(part, DeferredLogits) else part for part in output)
    if not dataclasses.is_dataclass(output) or isinstance(output, type):
        return output
    # an output of transformers leaves fields that are None out of its dictionary when it is made
    names = [f.name for f in dataclasses.fields(output)]
    deferred = [name for name in names if isinstance(getattr(output, name), DeferredLogits)]
    return dataclasses.replace(output, **dict.fromkeys(deferred))


def _same(loss: Callable[..., Any]) -> Callable[..., Any]:
    return loss
