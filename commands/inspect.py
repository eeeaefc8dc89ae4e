"""vtx-inspect: the contents of a bundle. It parses, calls and prints."""

from __future__ import annotations

import click

from vtx.commands.shared.options import named_once, option, options
from vtx.runtime.terminal.console import command, say, say_json, table
from vtx.runtime.terminal.last import last_bundle
from vtx.tools.common.loading import Loading


@command(epilog="vtx-inspect vtx-demo-k16-fp16\nvtx-inspect vtx-demo-k16-fp16 --json")
@click.argument("bundle", type=click.Path(), required=False, envvar="VTX_BUNDLE")
@options("positional", option("--json as_json", bool, "Print one JSON object."), "require_signature")
def inspect(bundle: str | None, named: str | None, as_json: bool, loading: Loading) -> None:
    """Show the contents of a bundle: stages, precision, sizes, KV bytes per K [default: the last one exported]."""
    from vtx.runtime.bundle.bundle import Bundle
    from vtx.runtime.bundle.card import read_card
    from vtx.runtime.precision import KV_DTYPES
    from vtx.runtime.report.inspect import INT8_KV, TEXT_TOKENS, describe, fidelity_lines, images_seen
    from vtx.runtime.strict import json_value
    from vtx.runtime.units import size

    opened = Bundle.open(last_bundle(named_once(bundle, named)), key=loading.key)
    facts = describe(opened)
    card = read_card(opened)
    if as_json:
        say_json({**facts, **({} if card is None else {"card": json_value(card)})})
        return
    model = facts["model"]
    say(f"{facts['bundle']}: {model['name']}, {facts['precision']} weights, {facts['kv_dtype']} KV cache")
    say(
        f"{model['family']}, {model['layers']} layers of {model['hidden']}, {model['heads']} heads on "
        f"{model['kv_heads']} key/value heads of {model['head_dim']}, {facts['layout']['max_tokens']} tokens an image"
    )
    say(images_seen(facts))
    if "video" in facts:
        video = facts["video"]["parameters"]
        sampled = f"{video['a_second']:g} frames a second, at most " if "a_second" in video else ""
        say(f"videos: {sampled}{video['frames']} frames (--frames), {facts['video']['max_tokens']} tokens")
    description = size(facts["bytes"]["all"])
    weights = size(facts["bytes"]["weights"])
    if KV_DTYPES[facts["kv_dtype"]].scaled:
        say(INT8_KV)
    say(f"context {facts['max_context']}; {description}, {weights} of it weights")
    if facts["activation_aware"]:
        say(f"activation-aware: channels scaled by what {facts['activation_aware']} questions put through them")
    for line in fidelity_lines(opened.manifest):
        say(line)
    stages = [[f"{s['first']}..{s['last']}", s["graph"], size(s["graph_bytes"])] for s in facts["stages"]]
    table("stages", ["layers", "graph", "graph size"], stages)
    variants = [
        [
            str(v["k"] or "none") + (" (default)" if v["k"] == facts["default_k"] else ""),
            str(v["full_layers"]),
            size(v["kv_bytes_one_image"]),
            size(v["kv_bytes_full_context"]),
        ]
        for v in facts["variants"]
    ]
    if facts["reductions"]:
        say("reductions, the default first: " + ", ".join(facts["reductions"]))
    if card is not None:
        say(f"the default, in place of those below: {card.in_words}")
    table("KV cache", ["K", "full layers", f"one image, {TEXT_TOKENS} text tokens", "full context"], variants)
