"""The command line: every command in one app.

Exit codes: 0 fine, 1 a check failed or something got slower, 2 the command was not understood.
"""

from __future__ import annotations

import typer

from tilewright.cli import bench, compile, explain, profile, report, tune, verify

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="GPU kernels for transformer models: verified, compiled for every SM, measured.",
)
for part in (explain, verify, compile, bench, report, profile, tune):
    app.registered_commands += part.app.registered_commands
