"""The rules of `resolve` about compiled steps."""

from __future__ import annotations

from dataclasses import replace

from stepgraph.runtime.changes import Change, Severity
from stepgraph.runtime.config import Backend, Compile, Debug, GraphConfig


def debug_compiles_nothing(config: GraphConfig, _: object) -> tuple[GraphConfig, list[Change]]:
    """Every kernel in a break leaves nothing to compile."""
    if config.compile is Compile.OFF or config.debug not in (Debug.EAGER_THROUGH_GRAPH, Debug.BREAK_EVERY_OP):
        return config, []
    reason = f"debug={config.debug} runs every kernel in a break"
    change = Change("compile", config.compile, Compile.OFF, "debug-compiles-nothing", reason, Severity.INFO)
    return replace(config, compile=Compile.OFF), [change]


def pieces(config: GraphConfig, _: object) -> tuple[GraphConfig, list[Change]]:
    """Segments between breaks are piecewise where they are compiled, and breakable where they are not."""
    if config.compile is Compile.OFF:
        before, after = Backend.PIECEWISE, Backend.BREAKABLE
        rule, severity = "piecewise-needs-compile", Severity.WARNING
        reason = "nothing is compiled; set compile, or ask for breakable"
    else:
        before, after = Backend.BREAKABLE, Backend.PIECEWISE
        rule, severity = "compiled-is-piecewise", Severity.INFO
        reason = f"compile={config.compile} compiles what lies between the breaks"
    changes = []
    decode, prefill = config.decode, config.prefill
    if decode.backend is before:
        decode = replace(decode, backend=after)
        changes.append(Change("decode.backend", before, after, rule, reason, severity))
    if prefill.backend is before:
        prefill = replace(prefill, backend=after)
        changes.append(Change("prefill.backend", before, after, rule, reason, severity))
    return replace(config, decode=decode, prefill=prefill), changes
