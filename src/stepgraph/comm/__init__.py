"""Tensor-parallel groups and all-reduces that know whether they are captured."""
