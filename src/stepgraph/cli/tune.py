"""`stepgraph tune`: measure what depends on the machine, and write it down as data."""

from __future__ import annotations

import typer

from stepgraph.cli.tune_allreduce import allreduce_command
from stepgraph.cli.tune_tiles import tiles_command

tune_app = typer.Typer(no_args_is_help=True, help="Measure what depends on the machine, and write it down as data.")
tune_app.command("tiles")(tiles_command)
tune_app.command("allreduce")(allreduce_command)
