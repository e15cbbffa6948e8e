"""Profiler traces: read, cut into steps, and added up."""
