"""What a model's head returns while its loss is computed by tiles: a promise instead of logits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

_REMEDY = "`use_tiled_loss` cannot serve this model: remove it."


@dataclass(frozen=True, kw_only=True, eq=False)
class DeferredLogits:
    """Stands for `head(hidden)` on its way from the head to the loss of a model's forward.

    It has the shape, dtype and device that the logits would have, and remembers what causal
    language models do with them: a factor, a bound by tanh, a cast. Everything else is refused.
    """

    hidden: torch.Tensor
    """Hidden states `(batch, seq, hidden)`."""

    head: Callable[[torch.Tensor], torch.Tensor]
    """The head's own forward."""

    shape: torch.Size
    """Shape of the logits `(batch, seq, vocabulary)`."""

    dtype: torch.dtype
    """Dtype of the logits."""

    scale: float = 1.0
    """Factor before the bound."""

    softcap: float | None = None
    """The bound, `softcap * tanh(logits / softcap)`."""

    under_tanh: bool = False
    """Whether tanh was taken and the factor after it is still to come."""

    @property
    def device(self) -> torch.device:
        """Where the logits would be."""
        return self.hidden.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Returns the shape, or one length of it."""
        return self.shape if dim is None else self.shape[dim]

    def float(self) -> DeferredLogits:
        """Returns itself in 32 bits: the loss is computed in 32 bits anyway."""
        return dataclasses.replace(self, dtype=torch.float32)

    def to(self, *targets: object, **named_targets: object) -> DeferredLogits:
        """Returns itself: a cast and a move to where it is are all that models ask for."""
        deferred = self
        for target in (*targets, *named_targets.values()):
            if isinstance(target, torch.dtype) and target.is_floating_point:
                deferred = dataclasses.replace(deferred, dtype=target)
            elif target not in (self.device, str(self.device)):
                self._refuse(f"to({target!r})")
        return deferred

    def contiguous(self) -> DeferredLogits:
        """Returns itself."""
        return self

    def mul(self, factor: object) -> DeferredLogits:
        """Remembers a factor."""
        if not isinstance(factor, (int, float)):
            return self._refuse("a product with a tensor")
        if self.under_tanh:  # tanh(scale * x) * factor: the bound is the factor
            scale = self.scale * factor
            scale = 1.0 if math.isclose(scale, 1.0) else scale
            return dataclasses.replace(self, scale=scale, softcap=float(factor), under_tanh=False)
        if self.softcap is not None:
            return self._refuse("a factor after the bound of the logits")
        return dataclasses.replace(self, scale=self.scale * factor)

    def div(self, divisor: object) -> DeferredLogits:
        """Remembers a divisor."""
        if not isinstance(divisor, (int, float)):
            return self._refuse("a division by a tensor")
        return self.mul(1.0 / divisor)

    def tanh(self) -> DeferredLogits:
        """Remembers that the logits are bounded."""
        if self.softcap is not None or self.under_tanh:
            return self._refuse("a second tanh")
        return dataclasses.replace(self, under_tanh=True)

    __mul__ = __rmul__ = mul
    __truediv__ = div

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> DeferredLogits:
        """Answers `torch.tanh(logits)` and the like."""
        name = getattr(func, "__name__", str(func))
        if name in ("tanh", "mul", "div", "multiply", "divide", "true_divide") and not kwargs:
            first, *rest = args
            if isinstance(first, cls):
                method = {"multiply": "mul", "divide": "div", "true_divide": "div"}.get(name, name)
                answer: DeferredLogits = getattr(first, method)(*rest)
                return answer
        return _refuse(f"torch.{name}")

    def __getattr__(self, name: str) -> NoReturn:
        # Only for what is not defined above. AttributeError, so that hasattr() works.
        raise AttributeError(
            f"a model's forward wants `{name}` of its logits before the loss, which does not exist "
            f"for logits that are never built. {_REMEDY}"
        )

    def _refuse(self, what: str) -> NoReturn:
        _refuse(what)


def _refuse(what: str) -> NoReturn:
    raise ValueError(
        f"a model's forward does {what} with its logits before the loss; expected at most a "
        f"number as factor, tanh and a cast. {_REMEDY}"
    )


def _refusing(operator: str) -> Callable[..., NoReturn]:
    def refuse(self: DeferredLogits, *args: object) -> NoReturn:
        _refuse(f"`{operator}`")

    return refuse


# Looked up on the class, past __getattr__.
for _operator in ("getitem", "setitem", "iter", "len", "add", "radd", "sub", "rsub", "neg", "pow"):
    setattr(DeferredLogits, f"__{_operator}__", _refusing(_operator))
