"""The command about recipes: which there are, what one says, and a new one that fits."""

from __future__ import annotations

import argparse


def add_recipes_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `recipes`, `recipes show` and `recipes new`."""
    parser = commands.add_parser(
        "recipes",
        help="list the recipes, show one, or write one that fits",
        description="List the shipped recipes with what they need by their plans.",
        epilog="example: rematic recipes show tiny-cpu training.epochs=2",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the list as JSON")
    form.add_argument(
        "--markdown",
        action="store_true",
        help="plan every recipe and print the table of the README, static baselines included",
    )
    parser.set_defaults(run=_list)
    below = parser.add_subparsers(metavar="COMMAND")
    _add_show(below)
    _add_new(below)


def _add_show(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = below.add_parser(
        "show",
        help="print a recipe with every value written out",
        description="Print a recipe with every value, and the file and line where it was written.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="name of a shipped recipe, or a path")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="values that replace the recipe's"
    )
    parser.add_argument("--json", action="store_true", help="print values and places as JSON")
    parser.set_defaults(run=_show)


def _add_new(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = below.add_parser(
        "new",
        help="write a recipe that fits",
        description="Ask the planner how a model can be fine-tuned on sequences of a length within "
        "the memory of a device, and write that as a recipe.",
        epilog="example: rematic recipes new --model Qwen/Qwen3-8B --device rtx-4090 --length 16k",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        required=True,
        help="name on the hub, folder of a model, or a recipe whose model is meant",
    )
    parser.add_argument(
        "--device", metavar="NAME", required=True, help="cpu, or a GPU such as rtx-4090"
    )
    parser.add_argument(
        "--length", metavar="N", required=True, help="longest sequence in tokens, such as 32k"
    )
    parser.add_argument(
        "--method",
        choices=("full", "lora", "qlora"),
        help="way of tuning; default: the first of these that fits",
    )
    parser.add_argument(
        "--budget", metavar="SIZE", help="memory that may be in use; needed for cpu, default auto"
    )
    parser.add_argument("--output", metavar="FILE", help="default: a name here that says it all")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.set_defaults(run=_new)


def _list(arguments: argparse.Namespace) -> int:
    from rematic.cli.recipes_command import run_list

    return run_list(arguments)


def _show(arguments: argparse.Namespace) -> int:
    from rematic.cli.recipes_command import run_show

    return run_show(arguments)


def _new(arguments: argparse.Namespace) -> int:
    from rematic.cli.new_recipe_command import run_new

    return run_new(arguments)
