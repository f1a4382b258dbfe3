"""One way to train of `variable_length.py`, in a process of its own under a heap cap.

Takes its settings, then one message for each document; answers each with one.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rematic.memory import capped_heap, is_out_of_memory, use_mapping_malloc, warm_up_threads
from rematic.memory.compiler_import import load_compiler_now
from rematic.memory.glibc import read_heap

KINDS = ("torch", "engine", "hf", "rematic")
"""What a process may be: torch's own mechanisms by block, rematic's actions by block without a
session, Hugging Face's checkpointing, a session that plans."""

LIST_SAVED = ("aten::mm[0]", "aten::mm[2]", "aten::mm[4]", "aten::mm[6]", "attention")
"""What `TitanPolicy` keeps of a Llama block, as rematic names it."""

Row = dict[str, Any]


class TitanPolicy:
    """The op list of torchtitan: attention, and every second matrix product.

    torchtitan `distributed/activation_checkpoint.py`, `_apply_op_sac`, with the kernel of the CPU.
    """

    def __init__(self) -> None:
        self._products: Counter[bool] = Counter()

    def __call__(self, context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Says whether the result of an op is kept."""
        import torch
        from torch.utils.checkpoint import CheckpointPolicy

        aten = torch.ops.aten
        kept = func == aten._scaled_dot_product_flash_attention_for_cpu.default
        if func == aten.mm.default:
            self._products[context.is_recompute] += 1
            kept = self._products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class TorchBlock:
    """The forward of a block, plain, checkpointed, or with the op list."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self.action = "keep"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - its result
        """Runs the block."""
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        if self.action == "keep":
            return self._forward(*args, **kwargs)
        if self.action == "recompute":
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        contexts = functools.partial(_contexts, create_selective_checkpoint_contexts)
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(create: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - torch's pair of contexts
    return create(TitanPolicy())


class Trainer:
    """A model and its optimizer, driven one document at a time."""

    def __init__(self, settings: Row) -> None:
        import torch

        from rematic.training.optimization import create_optimizer_state

        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.kind = settings["kind"]
        self.model = make_model(settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        create_optimizer_state(self.optimizer)
        load_compiler_now()
        self.session: Any = None
        self.step(list(range(32)))  # what is imported or set up late is there under the cap
        self._blocks: list[TorchBlock] = []
        self._engine: Any = None

    def prepare(self, settings: Row) -> None:
        """Puts the mechanism of its kind onto the model."""
        layers = self.model.model.layers
        if self.kind == "hf":
            self.model.gradient_checkpointing_enable()
        elif self.kind == "torch":
            self._blocks = [TorchBlock(layer.forward) for layer in layers]
            for layer, block in zip(layers, self._blocks, strict=True):
                layer.forward = block
        elif self.kind == "engine":
            from rematic.activations import Engine

            self._engine = Engine(self.model)
        else:
            self.session = _attach(self, settings)

    def use(self, assignment: Sequence[Any]) -> None:
        """Gives each block its action: a name, or the ops that it keeps."""
        if self.kind == "torch":
            for block, action in zip(self._blocks, assignment, strict=True):
                block.action = action
        else:
            from rematic.policy import Plan

            self._engine.apply(Plan(actions=tuple(map(action_of, assignment))))

    def step(self, tokens: Sequence[int]) -> float:
        """Forward, backward and update; returns the loss."""
        import torch

        ids = torch.tensor([tokens])
        batch = {"input_ids": ids, "labels": ids}

        def forward_backward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = self.model(**batch, use_cache=False).loss
            loss.backward()
            return loss.detach()

        if self.session is None:
            loss = forward_backward(batch)
        else:
            loss = self.session.run(forward_backward, batch)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)

    def num_evictions(self) -> int:
        """Returns how often blocks have let go of something, or run again, to make room."""
        if self._engine is None:
            return 0
        retries = sum(unit.num_retries for unit in self._engine.units)
        return int(self._engine.ledger.counts.num_evictions) + retries

    def drop_step(self) -> None:
        """Forgets a step that ran out of memory."""
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()


def action_of(written: Any) -> Any:  # noqa: ANN401 - a name or a list of op names, an action
    """Returns rematic's action of that name, or the selective one that keeps these ops."""
    from rematic.policy import Selective, action_named

    if isinstance(written, str):
        return Selective(save=LIST_SAVED) if written == "list" else action_named(written)
    return Selective(save=tuple(written))


def make_model(settings: Row) -> Any:  # noqa: ANN401 - a model of transformers
    """Returns the Llama that every way trains."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["hidden_size"] * 8 // 3,
        num_hidden_layers=settings["layers"],
        num_attention_heads=settings["hidden_size"] // 64,
        vocab_size=320,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def _attach(trainer: Trainer, settings: Row) -> Any:  # noqa: ANN401 - a session
    import rematic
    from rematic.journal import JournalWriter
    from rematic.training_tensors import existing_bytes

    idle = existing_bytes(trainer.model, (trainer.optimizer,))
    return rematic.attach(
        trainer.model,
        trainer.optimizer,
        budget=idle + settings["cap"],
        probe="host",
        journal=JournalWriter(Path(settings["folder"]) / "journal.jsonl"),
    )


def resident_bytes(line: str) -> int:
    """Returns `VmRSS` or `VmHWM` of this process."""
    for found in Path("/proc/self/status").read_text("ascii").splitlines():
        if found.startswith(line):
            return int(found.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {line}: expected Linux.")


def run_document(trainer: Trainer, tokens: Sequence[int], heap: Any) -> Row:  # noqa: ANN401
    """Trains one document; says what it took, or that it ran out of memory."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident bytes start anew
    free = read_heap()
    idle = resident_bytes("VmRSS") - (free.free_bytes if free else 0)
    wall, cpu = time.perf_counter(), time.process_time()
    lost, loss = False, None
    try:
        loss = trainer.step(tokens)
    except (RuntimeError, MemoryError) as error:
        if heap is not None:
            heap.release_ballast()
        if not is_out_of_memory(error):
            raise
        lost = True
    if lost:
        trainer.drop_step()
        if heap is not None:
            heap.hold_ballast()
    took = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    return {**took, "peak": resident_bytes("VmHWM") - idle, "lost": lost, "loss": loss}


def serve(settings: Row, pipe: Connection) -> None:
    """Answers documents until the other end is closed."""
    use_mapping_malloc()
    logging.getLogger("rematic").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    trainer = Trainer(settings)
    trainer.prepare(settings)
    warm_up_threads()
    gc.collect()
    with contextlib.ExitStack() as stack:
        cap = settings.get("cap")
        heap = None if cap is None else stack.enter_context(capped_heap(cap))
        pipe.send({"ready": True})
        while True:
            try:
                asked = pipe.recv()
            except EOFError:
                return
            if asked["assignment"] is not None:
                trainer.use(asked["assignment"])
            evicted = trainer.num_evictions()
            row = run_document(trainer, asked["tokens"], heap)
            row["evictions"] = trainer.num_evictions() - evicted
            if trainer.session is not None and not row["lost"]:
                row |= _step_figures(trainer.session.last_step)
            pipe.send(row)


def _step_figures(record: Any) -> Row:  # noqa: ANN401 - a step's record
    names = ("plan", "planned_by", "armed", "peak_source", "evictions", "op_retries")
    return {name: getattr(record, name) for name in names}
