"""The packages that made a bundle, listed in its record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from types import MappingProxyType

DISTRIBUTION = "vtx-edge"
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(?:\[(?P<extras>[^]]*)\])?[^;]*(?:;(?P<marker>.*))?")


@cache
def packages(requirement: str) -> Mapping[str, str]:
    """Name and version of every installed distribution that `requirement` leads to, itself included, by name.

    Dependencies of an extra count only if that extra was asked for; other markers count as met. Distributions that are
    not installed are left out. Cached: reading the metadata takes longer than writing the graphs of a small model.
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
        wanted = {extra.strip() for extra in extras.split(",")}
        for line in distribution.requires or ():
            extra = re.search(r"extra\s*==\s*[\"']([^\"']+)", line)
            if extra is None or extra[1] in wanted:
                pending.append(line)
    return MappingProxyType(dict(sorted(versions.items())))
