"""Topics of ROS 2 as sources of vtx-watch, and its events as a topic."""
