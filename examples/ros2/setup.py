from setuptools import setup

setup(
    name="vtx_watch_ros",
    version="0.1.0",
    description="Pictures of a topic for vtx-watch, and its events as a topic.",
    license="Apache-2.0",
    packages=["vtx_watch_ros"],
    data_files=[
        ("share/ament_index/resource_index/packages", ["resource/vtx_watch_ros"]),
        ("share/vtx_watch_ros", ["package.xml", "watch.toml"]),
    ],
    install_requires=["setuptools"],
    entry_points={"console_scripts": ["frames = vtx_watch_ros.frames:main", "answers = vtx_watch_ros.answers:main"]},
)
