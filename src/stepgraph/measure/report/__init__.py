"""One HTML page from all results of a folder."""
