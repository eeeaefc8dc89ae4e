"""Pictures that clients have sent, under the names that they gave them: a further request needs the name alone."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass

from vtx.runtime.errors import RequestError
from vtx.runtime.server.refusal import Refusal

MAX_NAME = 128  # characters


@dataclass(frozen=True, slots=True)
class NamedImage:
    """An image with the name that its client gave it; `url` is a data URL, None if it was sent before."""

    name: str
    url: str | None

    def __post_init__(self) -> None:
        if len(self.name) > MAX_NAME or not self.name.isprintable():
            raise RequestError(f"the uuid of an image is {self.name!r:.40}; it must be at most {MAX_NAME} characters")


class SentImages:
    """The images of each tenant by name, as data URLs of at most `most` bytes together; safe for many threads.

    Of too many, the one goes that was used least recently among those of the tenant that has most bytes. A name stands
    for the image that was sent with it last.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._urls = OrderedDict[tuple[str, str], str]()  # by tenant and name
        self._bytes = Counter[str]()  # of each tenant

    @property
    def bytes(self) -> int:
        """Of all images."""
        return self._bytes.total()

    def url(self, image: NamedImage, tenant: str) -> str:
        """The data URL of an image, kept for further requests. Raises Refusal (404) if it was not sent, or is gone."""
        key = tenant, image.name
        with self._lock:
            known = self._urls.pop(key, None)
            self._bytes[tenant] -= len(known or "")
            url = image.url or known
            if url is None:
                raise Refusal(
                    404,
                    f"no image has the uuid {image.name!r}, or it is kept no longer; send it with its image_url",
                    code="image_not_found",
                    param="messages",
                )
            self._urls[key] = url
            self._bytes[tenant] += len(url)
            while self.bytes > self._most:
                largest = max(self._bytes, key=self._bytes.__getitem__)
                oldest = next(key for key in self._urls if key[0] == largest)
                self._bytes[largest] -= len(self._urls.pop(oldest))
        return url
