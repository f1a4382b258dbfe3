"""The only place that touches private torch names, each feature-detected.

Delete a function here as soon as torch offers the same in public. What torch's documentation or
every dispatch mode speaks of in spite of its underscore (`_version`, `_schema`, `_buffers`,
`_parameters`) is used where it is needed.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves, tree_map

COMPILED_CALL = "_compiled_call_impl"
"""Where `module.compile()` leaves what a call of the module runs."""
_OF_ALL_MODULES: dict[str, Any] = vars(torch.nn.modules.module)
GLOBAL_HOOKS = tuple(
    (_OF_ALL_MODULES, kind)
    for kind in ("_global_forward_pre_hooks", "_global_forward_hooks")
    if isinstance(_OF_ALL_MODULES.get(kind), dict)
)
"""Where the hooks stand that `register_module_forward_hook` and its like put on every module."""
_KEPT_OUT: set[str] = set()
_callback_of_compiler: Callable[[], Any] = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None),
    "get_eval_frame_callback",
    lambda: None,
)
_HAS_CUDA = bool(torch.version.cuda or torch.version.hip)

T = TypeVar("T")
_peek_transforms = getattr(torch._C._functorch, "peek_interpreter_stack", None)
_hooks_allowed = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", lambda: True)
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def unwrapped(read: Callable[[], T], name: str) -> Callable[[], T]:
    """Returns what a public function without arguments calls inside torch, or the function itself.

    The wrappers are Python; a dozen of them around every call of a unit add up.
    """
    inner: Callable[[], T] = getattr(torch._C, name, read)
    return inner


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Returns a tensor's storage, or None where it has none: sparse tensors raise."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


def storage_key(tensor: torch.Tensor) -> int | None:
    """Returns the identity of a tensor's storage while it is alive, or None where it has none.

    (In one call and not by way of `storage_of`: it is asked of every saved tensor.)
    """
    try:
        key: int = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None
    return key


def key_of_storage(storage: torch.UntypedStorage) -> int:
    """Returns the identity of a storage while it is alive.

    The address of the data would not do: it is 0 for every empty, meta and fake tensor.
    """
    key: int = storage._cdata
    return key


def inside_function_transform() -> bool:
    """Returns whether a `torch.func` transform is running, which refuses saved-tensor hooks."""
    return _peek_transforms is not None and _peek_transforms() is not None


def inside_forward_ad() -> bool:
    """Returns whether a level of forward-mode differentiation is open."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def is_capturing_graph() -> bool:
    """Returns whether a CUDA graph is being captured on the current stream."""
    if not _HAS_CUDA or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch 2.13
        return False
    return torch.cuda.is_current_stream_capturing()


def parametrizations_are_cached() -> bool:
    """Returns whether `torch.nn.utils.parametrize.cached()` is open."""
    return getattr(parametrize, "_cache_enabled", 0) > 0


def has_outer_saved_tensor_hooks() -> bool:
    """Returns whether somebody else's default saved-tensor hooks are active (`save_on_cpu`)."""
    # True: do not skip hooks which the tracer has put aside.
    return _top_hooks is not None and _top_hooks(True) is not None


def without_dispatch_modes() -> contextlib.AbstractContextManager[object]:
    """Runs the body unseen by the dispatch modes around it, where torch offers that."""
    disabled = getattr(torch.utils._python_dispatch, "_disable_current_modes", None)
    return contextlib.nullcontext() if disabled is None else disabled()


def top_saved_tensor_hooks() -> object:
    """Returns the default saved-tensor hooks in force, the innermost ones; None without any."""
    return None if _top_hooks is None else _top_hooks(True)


def saved_tensor_hooks_are_refused() -> bool:
    """Returns whether `torch.autograd.graph.disable_saved_tensors_hooks` is open."""
    return not _hooks_allowed()


def sdpa_priority_order() -> list[int] | None:
    """Returns the order in which attention kernels are tried, None where torch has none."""
    get = getattr(torch._C, "_get_sdp_priority_order", None)
    return None if get is None else list(get())


def set_sdpa_priority_order(order: list[int] | None) -> None:
    """Sets the order read by `sdpa_priority_order`."""
    if order is not None:
        torch._C._set_sdp_priority_order(order)


def default_device_override() -> torch.device | None:
    """Returns the device of `torch.set_default_device` or an open `with torch.device`, else None.

    `torch.get_default_device` answers the same but costs 3 us; most models never set one.
    """
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if context is None and torch._C._len_torch_function_stack() == 0:
        return None
    return torch.get_default_device()


def selective_results(context: object) -> Iterator[tuple[Any, int, torch.Tensor, int]]:
    """Yields (op, which call of it, tensor, its version then) of what selective checkpoint holds.

    Nothing where a later torch keeps them elsewhere: their bytes then do not count as held.

    Args:
        context: The forward context.
    """
    for op, by_call in getattr(context, "storage", {}).items():
        for number, entry in by_call.items():
            for leaf in tree_leaves(entry):
                value = getattr(leaf, "val", None)
                if isinstance(value, torch.Tensor):
                    yield op, number, value, leaf.version


def put_selective_result(context: object, op: object, number: int, result: object) -> None:
    """Puts the result of one call of an op into what torch's selective checkpoint holds.

    Args:
        context: The forward context.
        op: The op.
        number: Which of its calls, counted from 0.
        result: What it returned; None to have it computed again.
    """
    by_call = getattr(context, "storage", {}).get(op)
    wrapper = getattr(checkpoint, "_VersionWrapper", None)
    recomputed = getattr(checkpoint, "_RECOMPUTE", None)
    if by_call is None or number not in by_call or wrapper is None or recomputed is None:
        return
    by_call[number] = recomputed if result is None else tree_map(wrapper, result)


def composable_checkpoint_state(module: nn.Module) -> Any:  # of a class that torch does not name
    """Returns the state of `torch.distributed._composable.checkpoint` on a module, None if none.

    It checkpoints while its `enable_hook` is true. Asked only if that part of torch is loaded.
    """
    home = sys.modules.get("torch.distributed._composable.contract")
    # (the public way to ask leaves an empty entry on the module)
    states = module.__dict__.get(getattr(home, "STATE_KEY", ""), {})
    return next((state for state in states.values() if hasattr(state, "enable_hook")), None)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Returns what `module.compile()` made of the module's call, None if it was not compiled."""
    call: Callable[..., Any] | None = getattr(module, COMPILED_CALL, None)
    return call


def activation_memory_budget() -> float:
    """Returns the share of activations that torch's compiler may keep, 1 for all of them."""
    config = sys.modules.get("torch._functorch.config")
    return float(getattr(config, "activation_memory_budget", 1.0))


def keep_compiler_out(package: str) -> bool:
    """Lets torch's compiler skip the code of a package: compiled regions end where it begins.

    Returns:
        Whether the compiler knows it now; it is not loaded only to be told.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    add = getattr(rules, "add", None)
    if add is None:
        return False
    if package not in _KEPT_OUT:
        _KEPT_OUT.add(package)
        add(package)  # calls into it are not traced
        skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", _skip_nothing)
        for code in _codes_of(package):  # what autograd calls: `fullgraph` would complain
            skip(code)
    return True


def _skip_nothing(code: types.CodeType) -> None:
    """Stands in for what torch's compiler does not offer."""


def inside_compiled_region() -> bool:
    """Returns whether the compiler looks at the frames of this thread."""
    return bool(_callback_of_compiler())


def _codes_of(package: str) -> Iterator[types.CodeType]:
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}."):
            for value in list(vars(module).values()):
                if getattr(value, "__module__", None) == name:
                    yield from _codes_in(value)


def _codes_in(value: Any) -> Iterator[types.CodeType]:
    if isinstance(value, (staticmethod, classmethod)):
        yield from _codes_in(value.__func__)
    elif isinstance(value, property):
        yield from _codes_in(value.fget)
    elif isinstance(value, types.FunctionType):
        waiting = [inspect.unwrap(value).__code__, value.__code__]
        while waiting:
            code = waiting.pop()
            yield code
            waiting += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    elif isinstance(value, type):
        for member in list(vars(value).values()):
            if not isinstance(member, type):
                yield from _codes_in(member)


def memory_snapshot_writer() -> Callable[[str], None] | None:
    """Returns what writes CUDA's allocator state to a file, None without a device in use.

    The file is for https://pytorch.org/memory_viz and for `torch.cuda._memory_viz`.
    """
    if not _HAS_CUDA or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch 2.13
        return None
    return getattr(torch.cuda.memory, "_dump_snapshot", None)


def number_of_collectives(group: Any) -> int | None:  # Any: typed without the method in torch 2.13
    """Returns how many collectives a process group has begun; None where it does not count."""
    number = getattr(group, "_get_sequence_number_for_group", None)
    try:
        return None if number is None else int(number())
    except RuntimeError:  # its backend does not
        return None


def joins_uneven_inputs(wrapper: nn.parallel.DistributedDataParallel) -> bool:
    """Returns whether a wrapper is inside its `join`, where every forward tells other ranks."""
    return bool(getattr(getattr(wrapper, "_join_config", None), "enable", False))


def has_own_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Returns whether hooks run when a gradient is complete (an optimizer that steps in backward).

    They may take the gradient away.
    """
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def process_group_store(prefix: str) -> Any:
    """Returns the part under `prefix` of the store that the process group was made with.

    Over a connection of its own where the store can have one, so that it is not kept waiting by
    somebody who waits for a key. None where there is no store.
    """
    distributed = torch.distributed
    find = getattr(distributed.distributed_c10d, "_get_default_store", None)
    try:
        store = None if find is None else find()
        clone = getattr(store, "clone", None)
        store = store if clone is None else clone()
    except (RuntimeError, ValueError):  # without `clone`, or a backend that needs no store
        return None
    make: Callable[..., Any] = getattr(distributed, "PrefixStore")  # noqa: B009 - no export
    return None if store is None else make(prefix, store)


def _calls_of_modules() -> Iterator[types.CodeType]:
    for name in ("_call_impl", "_wrapped_call_impl", "_slow_forward"):
        code = getattr(getattr(nn.Module, name, None), "__code__", None)
        if code is not None:
            yield code
            yield from (inner for inner in code.co_consts if isinstance(inner, types.CodeType))


CALLS_OF_MODULES = frozenset(_calls_of_modules())
"""What of `nn.Module` calls `self.forward`."""
