"""Run before a frozen program: a confined child of vtx is this program, started with a switch."""

from __future__ import annotations

from vtx.runtime.host.interpreter import serve_child

serve_child()
