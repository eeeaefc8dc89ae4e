"""API keys and their tenants: who sent a request, whose caches it uses, and how much it may ask for."""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vtx.runtime.api.options import MAX_PRIORITY
from vtx.runtime.errors import RequestError
from vtx.runtime.server.refusal import Refusal

SCOPE = "vtx.tenant"  # of a request, in its ASGI scope
MAX_KEY = 4096  # characters of an API key
MINUTE = 60.0  # seconds
DAY = 86400.0
RETRY_SECONDS = 2  # until one of a key's answers may have ended
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_OPTION = re.compile(r"(share|requests|answers|tokens|priority)=([\w.-]{1,64})|metrics", re.ASCII)
_FORM = "write KEY, or NAME KEY with share=GROUP, requests=N, answers=N, tokens=N, priority=N or metrics"


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of an API key, by `name` in logs and metrics.

    Tenants with the same `share` use each other's caches, by default nobody else's. `requests` a minute and concurrent
    `answers`, those that wait included, and `tokens` of prompts and answers a day (UTC) are limits; None: no limit.
    `metrics`: it may read /metrics next to others. `priority`: the highest that its requests may ask for.
    """

    name: str = ""
    share: str = ""
    requests: int | None = None
    answers: int | None = None
    metrics: bool = False
    tokens: int | None = None
    priority: int = MAX_PRIORITY


@dataclass(slots=True)
class Usage:
    """Requests and tokens of a key since the server's start, and `today` all tokens of the `day`, counted from 1970."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    today: int = 0
    day: int = 0

    def begin_day(self, day: int) -> None:
        """Count from 0 if another day has begun."""
        if day != self.day:
            self.day = day
            self.today = 0


ANYBODY = Tenant(metrics=True)  # of a server without keys


class Keys:
    """The tenants of a server by their API keys, and what they use. `replace` may be called from any thread."""

    def __init__(
        self,
        tenants: Mapping[str, Tenant],
        clock: Callable[[], float] = time.monotonic,
        date: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._date = date
        self._lock = threading.Lock()
        self._used = defaultdict[str, Usage](Usage)  # by tenants' names
        self._requests = defaultdict[str, deque[float]](deque)  # their times in the last minute
        self._answers = Counter[str]()
        self.replace(tenants)

    @classmethod
    def of(cls, keys: Keys | Collection[str]) -> Keys:
        """Keys that have no names yet, one tenant each."""
        return keys if isinstance(keys, Keys) else cls({key: unnamed(key) for key in keys})

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def replace(self, tenants: Mapping[str, Tenant]) -> None:
        """Accept these keys from now on, and no others."""
        self._tenants = {key.encode(): tenant for key, tenant in tenants.items()}

    def tenant(self, key: bytes) -> Tenant | None:
        """The tenant of a key; None if it is wrong. Takes the same time for every wrong key."""
        matching = [tenant for known, tenant in self._tenants.items() if hmac.compare_digest(key, known)]
        return matching[0] if matching else None

    def check_metrics(self, tenant: Tenant) -> None:
        """Raise Refusal (403) for a tenant that must not see the figures and requests of others."""
        if len(self._tenants) > 1 and not tenant.metrics:
            raise Refusal(
                403,
                "this key must not read /metrics and /slots, which show the requests of all keys; mark a key with "
                "`metrics` in the file of --api-keys",
                code="insufficient_permissions",
            )

    def admit(self, tenant: Tenant) -> None:
        """Count a request. Raises Refusal (429) for one beyond the tenant's requests a minute or tokens a day."""
        with self._lock:
            usage = self._used[tenant.name]
            date = self._date()
            usage.begin_day(int(date // DAY))
            if tenant.tokens is not None and usage.today >= tenant.tokens:
                message = f"this key has used {usage.today:,} tokens today, the limit is {tenant.tokens:,}"
                raise _too_many(message, int(DAY - date % DAY) + 1)
            usage.requests += 1
            if tenant.requests is None:
                return
            times = self._requests[tenant.name]
            now = self._clock()
            while times and times[0] <= now - MINUTE:
                times.popleft()
            if len(times) >= tenant.requests:
                retry = int(times[0] + MINUTE - now) + 1
                raise _too_many(f"{tenant.requests} requests a minute are the limit of this key", retry)
            times.append(now)

    def count(self, tenant: Tenant, prompt_tokens: int, completion_tokens: int) -> None:
        """Count the tokens of an answer, those of its prompt once more if they were in a cache."""
        with self._lock:
            usage = self._used[tenant.name]
            usage.begin_day(int(self._date() // DAY))
            usage.prompt_tokens += prompt_tokens
            usage.completion_tokens += completion_tokens
            usage.today += prompt_tokens + completion_tokens

    def usage(self, tenant: Tenant) -> dict[str, Any]:
        """The reply of /v1/usage: requests and tokens of a tenant since the server's start, and its limits."""
        with self._lock:
            usage = self._used[tenant.name]
            usage.begin_day(int(self._date() // DAY))
            limits = {"requests_per_minute": tenant.requests, "tokens_per_day": tenant.tokens}
            return {
                "key": tenant.name,
                "requests": usage.requests,
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "tokens_today": usage.today,
                "limits": {**limits, "concurrent_answers": tenant.answers},
            }

    @contextmanager
    def answering(self, tenant: Tenant, number: int) -> Iterator[None]:
        """Count answers until the end of the block. Raises Refusal (429) beyond the tenant's concurrent answers."""
        with self._lock:
            running = self._answers[tenant.name]
            if tenant.answers is not None and running + number > tenant.answers:
                message = f"{running} answers of this key are computed or wait, the limit is {tenant.answers}"
                raise _too_many(message, RETRY_SECONDS)
            self._answers[tenant.name] += number
        try:
            yield
        finally:
            with self._lock:
                self._answers[tenant.name] -= number


def check_priority(tenant: Tenant, priority: int) -> None:
    """Raise Refusal (403) for a priority above the tenant's."""
    if priority > tenant.priority:
        raise Refusal(
            403,
            f"priority is {priority}, this key may ask for at most {tenant.priority}; lower it, or leave it out",
            code="insufficient_permissions",
            param="priority",
        )


def _too_many(message: str, seconds: int) -> Refusal:
    return Refusal(
        429,
        f"{message}; try again in {seconds} s",
        code="rate_limit_exceeded",
        retry_after=seconds,
    )


def unnamed(key: str) -> Tenant:
    """The tenant of a key without a name: named by a part of the key's hash, which outlasts changes of its file."""
    name = f"key-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    return Tenant(name, name)


def read_keys(text: str, where: str) -> dict[str, Tenant]:
    """The tenants by the keys of a file, one a line. Raises RequestError, which names the line but no key."""
    tenants = dict[str, Tenant]()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        place = f"{where} line {number}"
        key = check_key(words[min(1, len(words) - 1)], place)
        tenant = unnamed(key) if len(words) == 1 else _named(words, place)
        if key in tenants or any(tenant.name == other.name for other in tenants.values()):
            raise RequestError(f"{place} repeats a key or a name; give each key its own name, with share=GROUP")
        tenants[key] = tenant
    if not tenants:
        raise RequestError(f"{where} holds no key; {_FORM}, one a line")
    return tenants


def check_key(key: str, where: str) -> str:
    """The key. Raises RequestError for one that clients cannot send."""
    if len(key) > MAX_KEY or not key.isascii() or key != key.strip():
        raise RequestError(f"{where}: an API key must be at most {MAX_KEY} ASCII characters, without spaces around it")
    return key


def _named(words: list[str], where: str) -> Tenant:
    """The tenant of a line that begins with its name and its key."""
    name, _, *options = words
    matches = [_OPTION.fullmatch(option) for option in options]
    if not _NAME.fullmatch(name) or not all(matches):
        raise RequestError(f"{where}: {_FORM}; a name and a GROUP have at most 64 letters, digits, `_`, `.` and `-`")
    values = {match[1]: match[2] for match in matches if match is not None}
    return Tenant(
        name,
        values.get("share", name),
        _number(values.get("requests"), where),
        _number(values.get("answers"), where),
        metrics="metrics" in options,
        tokens=_number(values.get("tokens"), where),
        priority=_priority(values.get("priority"), where),
    )


def _priority(value: str | None, where: str) -> int:
    priority = MAX_PRIORITY if value is None else int(value) if re.fullmatch(r"\d{1,2}", value, re.ASCII) else -1
    if not 0 <= priority <= MAX_PRIORITY:
        raise RequestError(f"{where}: priority must be a whole number from 0 to {MAX_PRIORITY}")
    return priority


def _number(value: str | None, where: str) -> int | None:
    if value is not None and not re.fullmatch(r"[1-9]\d{0,11}", value, re.ASCII):
        raise RequestError(f"{where}: requests, answers and tokens must be whole numbers from 1 to 999,999,999,999")
    return None if value is None else int(value)
