"""Capture sizes fitted to traffic: readers of traffic, a simulator of continuous batching, the optimum, its score."""
