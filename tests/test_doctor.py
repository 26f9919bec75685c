"""The doctor names each lack and its mend, and says whether the demo can run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest

from epdlab import doctor

NON_CUDA, CUDA12, CUDA13 = doctor.VARIANTS
ABSENT = doctor.Package("libabsent9", "libabsent", "absent")


def by_name(report: doctor.Report) -> dict[str, doctor.Lack]:
    return {lack.name: lack for lack in report.lacks}


def add_wheel(folder: Path, name: str, version: str = "0.3.13.post1") -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder that alone is searched for wheels."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def shadow_mooncake(monkeypatch: pytest.MonkeyPatch, folder: Path, engine: str) -> None:
    """Put a `mooncake` whose engine module is the given text before the real one, for child processes."""
    package = folder / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text(engine)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_this_machine_can_run_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is True
    assert answer["mooncake_variant"] in doctor.VARIANTS.values()
    assert answer["libibverbs"] is True
    assert Path(answer["dot"]).is_file()
    assert answer["device"] in ("cpu", "cuda")
    assert answer["transport"] in ("tcp", "rdma")
    assert answer["cores"] >= 1
    assert not [lack for lack in answer["lacks"] if lack["needed"]]


def test_text_says_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(json=False) == 0
    text = capsys.readouterr().out
    report = doctor.collect()
    for value in (report.mooncake_variant, report.mooncake_version, report.torch, report.device, report.transport):
        assert str(value) in text
    assert text.endswith("The demo can run here.\n")


def test_neither_torch_nor_mooncake_is_imported() -> None:
    program = "import sys; from epdlab import doctor; doctor.collect(); print({'torch', 'mooncake'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "set()\n"


def test_two_wheels_are_found_and_both_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    add_wheel(tmp_path, CUDA12 if CUDA12 not in doctor.installed_wheels() else CUDA13)
    monkeypatch.syspath_prepend(tmp_path)
    report = doctor.collect()
    assert not report.ok
    lack = by_name(report)["mooncake"]
    both = sorted(doctor.installed_wheels())
    assert len(both) == 2
    assert f"uninstall -y {' '.join(both)} && " in lack.mend
    assert lack.mend.endswith("==0.3.13.post1")


def test_no_wheel_is_a_lack_with_the_pinned_wheel_as_mend(only: Path) -> None:
    assert doctor.installed_wheels() == {}
    (lack,) = doctor._wheel_lacks({})
    assert lack.needed
    assert f"install {NON_CUDA}" in lack.mend


def test_a_wheel_on_two_paths_counts_once(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_wheel(only / "a", NON_CUDA)
    add_wheel(only / "b", NON_CUDA)
    monkeypatch.setattr(sys, "path", [str(only / "a"), str(only / "b"), str(only / "a")])
    assert doctor.installed_wheels() == {NON_CUDA: "0.3.13.post1"}


def test_missing_library_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LIBRARIES", MappingProxyType({**doctor.LIBRARIES, "libabsent.so.9": ABSENT}))
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "apt-get" else None)
    report = doctor.collect()
    lack = by_name(report)["libabsent"]
    assert not report.ok
    assert lack.package == "libabsent9"
    assert lack.mend.endswith("apt-get install -y libabsent9")


def test_missing_libibverbs_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"missing": ["libibverbs.so.1"], "error": "libibverbs.so.1: cannot open shared object file"}
    monkeypatch.setattr(doctor, "_probe", lambda wheels: found)
    report = doctor.collect()
    assert (report.ok, report.libibverbs) == (False, False)
    assert "libibverbs" in by_name(report)
    assert "mooncake" not in by_name(report)


def test_missing_dot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.run(json=False) == 1
    text = capsys.readouterr().out
    assert "LACK  dot:" in text
    assert "graphviz" in text
    assert "cannot run" in text


def test_missing_chromium_only_costs_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHROMIUM", ("no-such-browser",))
    report = doctor.collect()
    assert report.ok
    assert not by_name(report)["chromium"].needed


@pytest.mark.parametrize(
    ("engine", "mend"),
    [
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", "install nvidia-cuda-runtime-cu12"),
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "install nvidia-cuda-runtime"),
        ("raise ImportError('libcuda.so.1: cannot open shared object file')", f"&& {{pip}} install {NON_CUDA}"),
        ("raise ModuleNotFoundError('No module named mooncake')", "install --force-reinstall --no-deps"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "install --force-reinstall --no-deps"),
    ],
)
def test_failed_import_names_its_mend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str, mend: str
) -> None:
    shadow_mooncake(monkeypatch, tmp_path, engine)
    report = doctor.collect()
    assert not report.ok
    assert mend.format(pip=doctor._pip()) in by_name(report)["mooncake"].mend


def test_crash_while_importing_is_reported_by_its_signal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shadow_mooncake(monkeypatch, tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert "died of SIGSEGV" in by_name(doctor.collect())["mooncake"].problem


def test_absent_package_is_needed_and_another_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_own_pins", lambda with_extras=False: {"absent-package": "1.0", "pytest": "0.1"})
    absent, other = doctor._package_lacks()
    assert (absent.name, absent.needed) == ("absent-package", True)
    assert (other.name, other.needed) == ("pytest", False)
    assert other.mend.endswith("pip install pytest==0.1")


@pytest.mark.parametrize(("state", "active"), [("4: ACTIVE\n", True), ("1: DOWN\n", False)])
def test_rdma_devices_and_their_ports(tmp_path: Path, state: str, active: bool) -> None:
    port = tmp_path / "mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(state)
    assert doctor.rdma_devices(tmp_path) == {"mlx5_0": active}
    assert doctor.rdma_devices(tmp_path / "absent") == {}


@pytest.mark.parametrize(("active", "transport"), [(True, "rdma"), (False, "tcp")])
def test_transport_follows_active_rdma_ports(monkeypatch: pytest.MonkeyPatch, active: bool, transport: str) -> None:
    monkeypatch.setattr(doctor, "rdma_devices", lambda: {"mlx5_0": active})
    report = doctor.collect()
    assert (report.rdma_devices, report.transport) == (("mlx5_0",), transport)


@pytest.mark.parametrize(
    ("built_for", "found", "device"),
    [("13.0", [13010, 1], "cuda"), ("13.0", [12080, 1], "cpu"), ("12.8", [13000, 0], "cpu"), (None, [13010, 1], "cpu")],
)
def test_torch_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built_for: str | None, found: list[int], device: str
) -> None:
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path)
    monkeypatch.setattr(doctor, "_torch_cuda", lambda: built_for)
    monkeypatch.setattr(doctor, "_run_child", lambda program, argument: {"found": found})
    chosen, lacks = doctor.torch_device()
    assert chosen == device
    assert [lack.needed for lack in lacks] == ([] if device == "cuda" else [False])


def test_no_driver_needs_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "absent")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.torch_device() == ("cpu", [])


@pytest.mark.parametrize(
    ("managers", "conda", "uid", "mend"),
    [
        (["apt-get"], None, 0, "apt-get install -y graphviz"),
        (["apt-get", "dnf"], None, 1000, "sudo apt-get install -y graphviz"),
        (["dnf"], None, 1000, "sudo dnf install -y graphviz"),
        (["apt-get"], "/env", 1000, "conda install -c conda-forge graphviz"),
    ],
)
def test_mend_speaks_to_this_machines_package_manager(
    monkeypatch: pytest.MonkeyPatch, managers: list[str], conda: str | None, uid: int, mend: str
) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name if name in managers else None)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    if conda:
        monkeypatch.setenv("CONDA_PREFIX", conda)
    assert doctor._system_lack("dot", "missing", doctor.GRAPHVIZ).mend == mend
