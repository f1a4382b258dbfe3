"""`rematic train RECIPE [key=value ...]`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence

from rematic.cli.child import run_in_child
from rematic.cli.exit_codes import DONE, SIGNAL_BASE
from rematic.recipes import load_recipe


def run_train(arguments: argparse.Namespace) -> int:
    """Trains a recipe; with a heap cap in a process of its own, which the cap is for.

    Raises:
        ValueError: Something that the user gave cannot be used; nothing is left behind.
        RuntimeError: The training failed.
    """
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if recipe.memory.heap_cap and not arguments.in_child:
        return run_in_child(_child_arguments(arguments))
    from rematic.training.interrupts import StopRequest

    with StopRequest(notify=_notice) as stop:
        # An interrupted import leaves modules half made, and errors that lead nowhere.
        stop.defer("when the libraries are loaded")
        from rematic.journal import format_summary
        from rematic.training.ranks import find_ranks
        from rematic.training.run import train

        stop.stop_deferring()
        stop.raise_if_asked()
        prints = find_ranks(recipe).is_first
        summary = train(recipe, resume=arguments.resume, stop=stop, allow_code=arguments.allow_code)
        if prints:
            text = json.dumps(summary.to_dict(), indent=2)
            print(text if arguments.json else format_summary(summary))
        if summary.status == "finished":
            return DONE
        return SIGNAL_BASE + (stop.signal_number or signal.SIGINT)


def _child_arguments(arguments: argparse.Namespace) -> Sequence[str]:
    options = ["--in-child"]
    if arguments.resume is not None:
        options += ["--resume", arguments.resume]
    if arguments.json:
        options.append("--json")
    if arguments.allow_code:
        options.append("--allow-code")
    return ["train", *options, "--", arguments.recipe, *arguments.overrides]


def _notice(text: str) -> None:
    print(f"rematic: {text}", file=sys.stderr, flush=True)
