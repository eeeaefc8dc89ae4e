"""The errors that vtx raises on purpose: one tree under `VtxError`; messages name quantity, limit and fix."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` with escape sequences and other control and direction characters spelt out, for terminals.

    Line breaks and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" or (char.isspace() and char > "\x9f") else ascii(char)[1:-1]
        for char in text
    )


class VtxError(Exception):
    """Base of every error vtx raises on purpose; the commands print it as one line and exit with 1.

    Messages quote names from untrusted files, so their text is always printable.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class ImageError(VtxError):
    """An image cannot be read, or is beyond the limits set before decoding."""


class CheckpointError(VtxError):
    """A Hugging Face checkpoint is damaged, hostile or incomplete."""


class UnsupportedModelError(CheckpointError):
    """A sound checkpoint of a model, or with an option, that vtx does not export."""


class BundleError(VtxError):
    """A bundle is damaged, incomplete, from another version, or reaches outside itself."""


class TemplateError(VtxError):
    """A chat template cannot be rendered safely, or does not place the images."""


class RequestError(VtxError):
    """A question or an option cannot be served: a K that was not prebuilt, an empty question."""


class ContextError(RequestError):
    """The prompt and its answer need more KV slots than the bundle holds: its `tokens`, and `most` in a context.

    Both are None if they were not counted.
    """

    def __init__(self, message: str, tokens: int | None = None, most: int | None = None) -> None:
        super().__init__(message)
        self.tokens, self.most = tokens, most


class ConversationBusyError(RequestError):
    """Another thread or task reads an answer of this conversation."""


class DeadlineError(RequestError):
    """The actions were not there by their deadline; unfinished or late ones are never given out."""


class ModelClosedError(RequestError):
    """The model was closed; load it again."""


class ExportError(VtxError):
    """An export cannot be done or was stopped: disk, memory, an output that exists."""


class DeviceError(VtxError):
    """A device or backend that was asked for is not there, or a library is missing."""
