"""A server of the official MCP SDK over stdio, for the tests. With `--stay` it ignores that its client has gone."""

import os
import signal
import sys
import time

from mcp.server import MCPServer
from mcp.types import AudioContent, EmbeddedResource, ImageContent, TextContent, TextResourceContents

server = MCPServer("tests")
notes: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


@server.tool()
def process() -> int:
    """Tell the process of this server."""
    return os.getpid()


@server.tool()
def note(text: str) -> str:
    """Note a text, and tell all notes so far."""
    notes.append(text)
    return " ".join(notes)


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ValueError(why)


@server.tool()
def show(data: str) -> list[TextContent | ImageContent | AudioContent | EmbeddedResource]:
    """Show an image, among other parts."""
    resource = EmbeddedResource(type="resource", resource=TextResourceContents(uri="notes://all", text="the notes"))
    image, audio = ImageContent(type="image", data=data, mime_type="image/png"), AudioContent(type="audio", data="", mime_type="audio/wav")
    return [TextContent(type="text", text="A plot:"), image, audio, resource]


@server.tool()
def die() -> str:
    """End this server at once."""
    os._exit(3)


if __name__ == "__main__":
    if "--stay" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            server.run("stdio")
        finally:
            time.sleep(600)
    server.run("stdio")
