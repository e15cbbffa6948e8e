"""`python -m stepgraph`, for a machine where the package is not installed."""

from .cli.app import main

if __name__ == "__main__":
    main()
