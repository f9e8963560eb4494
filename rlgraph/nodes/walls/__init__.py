"""The sandbox of a tool's code. The sandboxed process loads this folder as a package of its own, without the rest of the library."""
