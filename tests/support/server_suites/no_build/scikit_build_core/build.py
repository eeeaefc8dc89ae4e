"""The same backend under the name that llama-cpp-python asks for."""

from setuptools.build_meta import prepare_metadata_for_build_wheel

__all__ = ["prepare_metadata_for_build_wheel"]
