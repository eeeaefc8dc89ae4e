"""The packages that took part in making a bundle: a bill of materials for its record."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from types import MappingProxyType

DISTRIBUTION = "vtx-edge"
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(?:\[(?P<extras>[^]]*)\])?[^;]*(?:;(?P<marker>.*))?")


@cache
def packages(requirement: str) -> Mapping[str, str]:
    """Name and version of every installed distribution that `requirement` leads to, itself included, by name.

    Dependencies of an extra count where that extra was asked for. What is not installed is left out. Looked up once in
    a process: reading the metadata takes longer than writing the graphs of a small model.
    """
    versions: dict[str, str] = {}
    pending, seen = [requirement], set[tuple[str, str]]()
    while pending:
        match = REQUIREMENT.match(pending.pop())
        if match is None:
            continue
        name, extras = match["name"].lower().replace("_", "-"), match["extras"] or ""
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        versions[name] = distribution.version
        pending += _required(distribution, {extra.strip() for extra in extras.split(",")})
    return MappingProxyType(dict(sorted(versions.items())))


def _required(distribution: metadata.Distribution, extras: set[str]) -> Iterator[str]:
    """The requirements of a distribution without those of other extras; other markers are taken as met."""
    for line in distribution.requires or ():
        of = re.search(r"extra\s*==\s*[\"']([^\"']+)", line)
        if of is None or of[1] in extras:
            yield line
