"""The file of `vtx-doctor --gpu`, on the stand-in for a GPU and without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.gpu_standin import Gpu
from tests.support.json_files import read_json
from vtx.cli import doctor
from vtx.runtime.errors import DeviceError
from vtx.runtime.report import gpu


@pytest.mark.slow
def test_every_step_on_a_gpu_is_in_one_file(
    with_engines: Path, device: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "load_driver", lambda: device)
    file = tmp_path / "gpu.json"
    result = CliRunner().invoke(doctor, [str(with_engines), "--gpu", str(file)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = read_json(file)
    assert report["driver"]["recorded"]
    assert report["driver"]["total"] == device.total
    assert {*report["engines"]["sm89"]["bytes"]} >= {"head.trt.onnx", "vision.trt.onnx"}
    assert all(check["passed"] for check in report["answers"]["golden"]["checks"])
    short, again, long, last = report["answers"]["conversations"]
    assert [talk["answers"][0]["token_ids"] for talk in (again, last)] == [short["answers"][0]["token_ids"]] * 2
    assert len(long["answers"][0]["token_ids"]) > len(short["answers"][0]["token_ids"])


def test_a_machine_without_a_driver_has_a_file_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise DeviceError("NVIDIA's driver is not installed")

    monkeypatch.setattr(gpu, "load_driver", missing)
    file = tmp_path / "gpu.json"
    result = CliRunner().invoke(doctor, ["--gpu", str(file)], catch_exceptions=False)
    assert result.exit_code == 1
    assert "driver: NVIDIA's driver is not installed" in result.stderr
    assert read_json(file)["driver"]["error"] == "NVIDIA's driver is not installed"


def test_copies_that_go_wrong_are_an_error(device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "load_driver", lambda: device)
    monkeypatch.setattr(Gpu, "copy_rows", lambda *_: (0,))
    with pytest.raises(DeviceError, match="the GPU copies other numbers than it was told to"):
        gpu.use_driver()
