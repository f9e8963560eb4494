"""The walls around a tool's code. Loaded by the process it runs in as a package of its own, which needs nothing of this library."""
