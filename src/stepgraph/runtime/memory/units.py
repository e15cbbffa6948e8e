"""Bytes in words."""


def in_units(nbytes: int) -> str:
    """`512 bytes`, `3.0 KiB`, `16.5 MiB`, `1.25 GiB`; with a minus sign where less than nothing."""
    size = abs(nbytes)
    for name, unit, digits in (("GiB", 1 << 30, 2), ("MiB", 1 << 20, 1), ("KiB", 1 << 10, 1)):
        if size >= unit:
            return f"{nbytes / unit:,.{digits}f} {name}"
    return f"{nbytes} bytes"
