"""`python -m stepgraph`, for a machine where the package is not installed."""

from stepgraph.cli.app import main

if __name__ == "__main__":
    main()
