"""A node that publishes the events of vtx-watch from stdin, each as a std_msgs/String with a line of JSON.

vtx-watch llava-7b watch.toml | ros2 run vtx_watch_ros answers --ros-args -p topic:=/vtx/events
"""

from __future__ import annotations

import sys


def main() -> None:
    """Publish until vtx-watch ends."""
    import rclpy
    from rclpy.node import Node
    from std_msgs.msg import String

    rclpy.init()
    node = Node("vtx_answers")
    publisher = node.create_publisher(String, str(node.declare_parameter("topic", "/vtx/events").value), 10)
    try:
        for line in sys.stdin:
            publisher.publish(String(data=line.rstrip("\n")))
    except KeyboardInterrupt:
        pass
    finally:
        node.destroy_node()
        rclpy.try_shutdown()


if __name__ == "__main__":
    main()
