"""Parses the command line and runs one command.

Only the chosen command imports what it needs: `rematic --version` answers at once.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence

from rematic.cli.exit_codes import FAILED, INTERRUPTED, USER_ERROR
from rematic.cli.recipes_parsers import add_recipes_command
from rematic.cli.run_parsers import add_run_commands
from rematic.version import __version__

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `rematic` and returns its exit code.

    0: done; 1: the run failed; 2: something in what the user gave; 130: interrupted.

    Args:
        argv: Arguments after the command's name; None: those of the process.
    """
    _print_anything()
    try:
        arguments = _parse(argv)
    except SystemExit as exit_request:  # argparse has said what there is to say
        return int(exit_request.code or 0)
    run: Command = arguments.run
    try:
        return run(arguments)
    except ValueError as error:
        return _complain(str(error), code=USER_ERROR)
    except ModuleNotFoundError as error:
        return _complain(_missing_package(error), code=USER_ERROR)
    except RuntimeError as error:
        return _complain(str(error), code=FAILED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe left; there is nobody to tell
        return FAILED
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return _complain(f"{error.strerror or error}{where}", code=FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted", code=INTERRUPTED)


def _print_anything() -> None:
    """Writes what a terminal's encoding lacks as escapes: a journal may quote any bytes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; `key=value` may also stand behind an option.

    (argparse of Python 3.10 to 3.13 gives a `nargs="*"` all it gets at its first place.)
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["launch"]:  # all that follows is Accelerate's and the script's
        return argparse.Namespace(run=_launch, arguments=words[1:])
    parser = build_parser()
    arguments, left = parser.parse_known_args(words)
    if any(word.startswith("-") for word in left) or (left and "overrides" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        arguments.overrides = [*arguments.overrides, *left]
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="rematic",
        description="Keep long-sequence fine-tuning inside the memory you have.",
    )
    parser.add_argument("--version", action="version", version=f"rematic {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_train(commands)
    _add_plan(commands)
    add_recipes_command(commands)
    _add_report(commands)
    add_run_commands(commands)
    _add_demo(commands)
    commands.add_parser("launch", help="`accelerate launch`, with recompute_config in its file")
    _add_config(commands)
    return parser


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "train",
        help="train a recipe",
        description="Train a recipe and write a run directory.",
        epilog="example: rematic train tiny-cpu training.epochs=2 memory.budget=900MiB",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="name of a shipped recipe, or a path")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="values that replace the recipe's"
    )
    parser.add_argument("--resume", metavar="RUN", help="go on with the run in this directory")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--allow-code",
        action="store_true",
        help="let the recipe name classes (_target_) outside torch and bitsandbytes",
    )
    parser.set_defaults(run=_train)


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="tell what fits, before anything runs",
        description="Predict memory and time of a recipe's steps under several policies. Needs "
        "neither weights nor the device.",
        epilog="example: rematic plan tiny-cpu --lengths 256,1k --max-length",
    )
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help="name of a shipped recipe, a path, or package.module:name of what makes a model",
    )
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="values that replace the recipe's"
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, or a GPU such as a100-80g")
    parser.add_argument("--budget", metavar="SIZE", help="instead of the recipe's memory.budget")
    parser.add_argument("--lengths", metavar="N,N", help="tokens of a sequence, such as 4k,8k,32k")
    parser.add_argument(
        "--batch", metavar="N", type=int, help="sequences of a batch, instead of data.batch_size"
    )
    parser.add_argument("--padded", action="store_true", help="a mask hides some of the tokens")
    parser.add_argument(
        "--max-length", action="store_true", help="find the longest sequence that fits, too"
    )
    parser.add_argument("--plot", metavar="FILE.svg", help="draw memory over the longest step")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=_plan)


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("report", help="print what a run did")
    parser.add_argument("run_path", metavar="RUN", help="a run directory, or its journal")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=_report)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="watch a memory cap kill a plain run and not this one",
        description="Train real documents under a real memory cap: everything kept, everything "
        "recomputed, and rematic, side by side. Takes some minutes on two cores.",
    )
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="values that replace those of tiny-cpu"
    )
    parser.add_argument("--documents", metavar="N", type=int, help="train only N documents")
    parser.add_argument("--max-length", metavar="N", type=int, help="cut documents at N tokens")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=_demo)


def _add_config(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "config",
        help="turn rematic on or off in an Accelerate config",
        description="Show what an Accelerate config says about recomputation, or set it: only the "
        "lines of recompute_config are touched.",
        epilog="example: rematic config --enable --recipe long.yaml --config_file fsdp.yaml",
    )
    parser.add_argument("--config_file", "--config-file", metavar="FILE", required=True)
    toggle = parser.add_mutually_exclusive_group()
    toggle.add_argument("--enable", action="store_true", help="turn it on")
    toggle.add_argument("--disable", action="store_true", help="turn it off")
    parser.add_argument("--recipe", metavar="RECIPE", help="name or path of the recipe")
    parser.add_argument("--json", action="store_true", help="print the setting as JSON")
    parser.set_defaults(run=_config)


def _train(arguments: argparse.Namespace) -> int:
    from rematic.cli.train_command import run_train

    return run_train(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from rematic.cli.plan_command import run_plan

    return run_plan(arguments)


def _report(arguments: argparse.Namespace) -> int:
    from rematic.cli.report_command import run_report

    return run_report(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    from rematic.cli.demo_command import run_demo

    return run_demo(arguments)


def _launch(arguments: argparse.Namespace) -> int:
    from rematic.cli.launch_command import run_launch

    return run_launch(arguments.arguments)


def _config(arguments: argparse.Namespace) -> int:
    from rematic.cli.config_command import run_config

    return run_config(arguments)


def _complain(text: str, *, code: int) -> int:
    print(f"rematic: {text}", file=sys.stderr)
    return code


def _missing_package(error: ModuleNotFoundError) -> str:
    extra = "accelerate" if error.name == "accelerate" else "train"
    return (
        f"the package {error.name!r} is not installed; this command needs the extra `{extra}`: "
        f"pip install 'rematic[{extra}]'"
    )
