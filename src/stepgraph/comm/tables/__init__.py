"""Tables of thresholds, as data; see `comm.thresholds`."""
