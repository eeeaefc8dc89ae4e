"""Topics of ROS 2 as sources of vtx-watch, and its events as a topic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def running_node(name: str) -> Iterator[Any]:
    """A node of ROS 2 until the block ends, which an interrupt does without an error."""
    import rclpy
    from rclpy.node import Node

    rclpy.init()
    node = Node(name)
    try:
        yield node
    except KeyboardInterrupt:
        pass
    finally:
        node.destroy_node()
        rclpy.try_shutdown()
