"""Cards as vtx-fit writes them."""

from __future__ import annotations

from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.card import (
    FORMAT,
    Card,
    Configuration,
    Evidence,
    FittedData,
    Guarantee,
    Times,
    manifest_digest,
)


def card_of(bundle: Bundle, k: int | str | None, reduce: str, device: str = "cpu", compute: str = "f32") -> Card:
    times = Times(1.5, 2.5, 100)
    chosen = Evidence(
        bundle.folder.name, Configuration(device, compute, k, reduce), 0.0, 0.02, times, None, times, 1 << 20
    )
    return Card(
        format=FORMAT, manifest=manifest_digest(bundle), chosen=chosen,
        guarantee=Guarantee(0.02, 0.95, "Clopper-Pearson", 1),
        data=FittedData("questions.jsonl", "0" * 64, 300, 300, 150, 150), reference="bundle: K = none",
        max_new_tokens=32, threads=1, cpu="a processor", system="Linux", versions={"vtx-edge": "0.1.0"}, quiet=True,
        front=(chosen,),
    )  # fmt: skip
