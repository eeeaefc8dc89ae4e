"""The limits of a server: on requests, and on the memory kept for them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from vtx.runtime.checks import check_number, check_whole
from vtx.runtime.scheduler.engine import Capacity

MIN_STALL = 5.0  # seconds; a thread that waits for work gives a sign of life each second
MAY_BE_NONE = ("queue", "kept", "kv", "image_tokens", "tiles", "pictures", "sent")


@dataclass(frozen=True, slots=True)
class Limits(Capacity):
    """Limits of one server; sizes in bytes, times in seconds. Those of each model are `Capacity`'s.

    `body`: of a request; of as many as `bodies` there is memory for those that arrive or wait to be read, for those of
    one client half of it; at most `uploads` bodies, `client_uploads` of one client, arrive at a time. `sent`: of images
    that are kept under names that their clients gave them. `pixels`: of one image. `images`, `prompts`,
    `new_tokens`: of one request. `queue`: requests of one model that wait. `body_seconds`: for a request to arrive.
    `seconds`: from there to the answer's end, with waiting. `write_seconds`: for a client to receive what was sent.
    `comment_seconds`: without an event of a stream, after which it gets a comment. `stall_seconds`: without a sign of
    life of a thread that computes. `fetch_seconds`: for an image at an address, which may have as many bytes as a body.
    `grace_seconds`: for running answers to end after a signal. `stream`: bytes of a stream that may be taken up again,
    `resume_seconds`: for its client to do so, while it runs and after its end.
    """

    body: int = 32 << 20
    bodies: int = 8
    uploads: int = 256
    client_uploads: int = 64
    sent: int = 64 << 20
    stream: int = 4 << 20
    pixels: int = 32 << 20
    images: int = 8
    prompts: int = 32
    new_tokens: int = 1024
    queue: int = 32
    body_seconds: float = 30.0
    seconds: float = 600.0
    write_seconds: float = 30.0
    fetch_seconds: float = 10.0
    comment_seconds: float = 15.0
    stall_seconds: float = 600.0
    grace_seconds: float = 30.0
    resume_seconds: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            name = field.name.replace("_", " ")
            value = getattr(self, field.name)
            if field.name == "stall_seconds":
                check_number(name, value, f"at least {MIN_STALL:g} seconds", least=MIN_STALL, most=1e6)
            elif "seconds" in field.name:
                check_number(name, value, "a number of seconds above 0", least=1e-3, most=1e6)
            else:
                check_whole(name, value, 0 if field.name in MAY_BE_NONE else 1)
