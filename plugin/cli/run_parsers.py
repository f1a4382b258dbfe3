"""The commands about a run: what it did, why, and what it should do next."""

from __future__ import annotations

import argparse


def add_run_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `status`, `explain`, `audit`, `rollback`, `pin` and `unpin`."""
    parser = _add(commands, "status", "tell where a run stands")
    parser.set_defaults(run=_status)
    parser = _add(commands, "explain", "tell what decided a step")
    parser.add_argument("--step", metavar="N", type=int, help="number of the step; default: last")
    parser.set_defaults(run=_explain)
    parser = _add(commands, "audit", "decide everything again from the journal and compare")
    parser.set_defaults(run=_audit)
    parser = _add_request(commands, "rollback", "take back the last policy of a running job")
    parser.add_argument("--steps", metavar="N", type=int, help="so many switches; default 1")
    parser = _add_request(commands, "pin", "keep a running job to one policy")
    parser.add_argument("policy", metavar="POLICY", help="name of the policy, such as recompute")
    _add_request(commands, "unpin", "let the policy of a running job change again")


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, what: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=what)
    parser.add_argument("run_path", metavar="RUN", help="a run directory, or its journal")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    return parser


def _add_request(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, what: str
) -> argparse.ArgumentParser:
    parser = _add(commands, name, what)
    parser.add_argument("--reason", metavar="TEXT", help="goes into the journal")
    parser.add_argument(
        "--wait", metavar="SECONDS", type=float, default=60.0, help="for the answer; default 60"
    )
    parser.set_defaults(run=_request, request=name)
    return parser


def _status(arguments: argparse.Namespace) -> int:
    from rematic.cli.status_command import run_status

    return run_status(arguments)


def _explain(arguments: argparse.Namespace) -> int:
    from rematic.cli.explain_command import run_explain

    return run_explain(arguments)


def _audit(arguments: argparse.Namespace) -> int:
    from rematic.cli.audit_command import run_audit

    return run_audit(arguments)


def _request(arguments: argparse.Namespace) -> int:
    from rematic.cli.operator_command import run_request

    return run_request(arguments)
