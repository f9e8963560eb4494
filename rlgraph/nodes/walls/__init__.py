"""The sandbox of a tool's code. The sandboxed process loads this folder as a separate package, without the rest of the library."""
