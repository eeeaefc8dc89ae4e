"""A node that publishes the events of vtx-watch from stdin, each as a std_msgs/String with a line of JSON.

vtx-watch llava-7b watch.toml | ros2 run vtx_watch_ros answers --ros-args -p topic:=/vtx/events
"""

from __future__ import annotations

import sys

from vtx_watch_ros import running_node


def main() -> None:
    """Publish until vtx-watch ends."""
    from std_msgs.msg import String

    with running_node("vtx_answers") as node:
        publisher = node.create_publisher(String, str(node.declare_parameter("topic", "/vtx/events").value), 10)
        for line in sys.stdin:
            publisher.publish(String(data=line.rstrip("\n")))


if __name__ == "__main__":
    main()
