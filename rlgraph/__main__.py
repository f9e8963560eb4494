"""`python -m rlgraph`: the command `rlgraph`."""

from rlgraph_cli import main

if __name__ == "__main__":
    main()
