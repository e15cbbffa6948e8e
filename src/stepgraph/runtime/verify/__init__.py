"""Finds a wrong replay: every captured key against eager, down to the first operator that differs."""

from stepgraph.runtime.verify.report import Fault, FaultKind, KeyReport, VerifyReport

__all__ = ["Fault", "FaultKind", "KeyReport", "VerifyReport"]
