"""Answers as they come, for many clients of an asyncio server; a client that leaves cancels its answer.

Usage:

    python examples/python/async_server.py BUNDLE IMAGE --port 8080
    echo "What color is the circle?" | nc localhost 8080
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import vtx


class Server:
    """One question a line, one answer a line. Each client has a conversation of its own about the same image."""

    def __init__(self, model: vtx.Model, image: Path) -> None:
        self._model, self._image = model, image

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a client until it leaves."""
        try:
            with self._model.open(self._image) as image:
                while line := await reader.readline():
                    await self._answer(image, line.decode(errors="replace").strip(), writer)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the client has left, or the server stops; closing the image ended its answer
        finally:
            writer.close()

    @staticmethod
    async def _answer(image: vtx.Conversation, question: str, writer: asyncio.StreamWriter) -> None:
        try:
            async for piece in image.astream(question, timeout=30, max_new_tokens=64):
                writer.write(piece.encode())
                await writer.drain()
        except vtx.VtxError as e:
            writer.write(f"error: {e}".encode())
        writer.write(b"\n")
        await writer.drain()


async def run(bundle: Path, image: Path, port: int) -> None:
    """Serve until interrupted."""
    with vtx.load(bundle) as model:
        server = await asyncio.start_server(Server(model, image).serve, "localhost", port)
        print(f"listening on port {server.sockets[0].getsockname()[1]}", flush=True)
        try:
            await asyncio.Event().wait()
        finally:  # no wait_closed: from Python 3.12 on it waits until every client has left
            server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("image", type=Path)
    parser.add_argument("--port", type=int, default=8080, help="0: any that is free")
    options = parser.parse_args()
    try:
        asyncio.run(run(options.bundle, options.image, options.port))
    except KeyboardInterrupt:
        print("stopped")


if __name__ == "__main__":
    main()
