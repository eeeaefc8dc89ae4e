"""The parts of vtx that PyInstaller packs: the runtime's modules, found by name, its data and its entry points."""

from __future__ import annotations

from PyInstaller.utils.hooks import collect_data_files, collect_submodules, copy_metadata

hiddenimports = collect_submodules("vtx.runtime")
datas = [*collect_data_files("vtx.runtime"), *collect_data_files("vtx.profiles"), *copy_metadata("vtx-edge")]
excludedimports = ["torch", "transformers"]
