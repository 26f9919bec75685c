"""Every list of dependencies says the same: pyproject.toml, environment.yml, requirements.lock, the set-up script."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from epdlab import doctor

ROOT = Path(__file__).resolve().parent.parent
CONDA_NAMES = {"pytorch": "torch", "python-graphviz": "graphviz"}
CONDA_ONLY = {"python", "pip", "graphviz", "rdma-core"}
PIN = re.compile(r"[a-z0-9-]+==[0-9][0-9a-z.]*")


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def conda() -> list:
    return yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]


@pytest.fixture
def bootstrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The set-up script as a module, working on an empty project in a temporary folder."""
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "tools/bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    for name in module.INPUTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name, value in {"ROOT": tmp_path, "VENV": venv, "STAMP": venv / "stamp", "LOG": venv / "log"}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.delenv("EPDLAB_VARIANT", raising=False)
    return module


def runtime_pins(project: dict) -> dict[str, str]:
    return dict(line.split("==") for line in project["dependencies"])


def lock_pins() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def install_wheel(venv: Path, name: str, broken: bool = False) -> None:
    site = venv / "lib/python3.11/site-packages"
    (site / f"{name}-0.3.13.post1.dist-info").mkdir(parents=True)
    if not broken:
        (site / "mooncake").mkdir(exist_ok=True)
        (site / "mooncake/engine.so").touch()


def test_every_requirement_is_an_exact_pin(project: dict) -> None:
    extras = project["optional-dependencies"]
    for line in [*project["dependencies"], *(line for lines in extras.values() for line in lines)]:
        assert PIN.fullmatch(line), line


def test_each_extra_brings_one_mooncake_wheel_of_one_release(project: dict) -> None:
    extras = project["optional-dependencies"]
    lines = [line for extra in ("cpu", "cuda12", "cuda13") for line in extras[extra] if line.startswith("mooncake")]
    assert [line.split("==")[0] for line in lines] == list(doctor.VARIANTS)
    assert len({line.split("==")[1] for line in lines}) == 1


def test_conda_pins_are_those_of_pyproject(project: dict, conda: list) -> None:
    pins = dict(line.split("=") for line in conda if isinstance(line, str) and "=" in line)
    pins.pop("python")
    assert pins
    wanted = runtime_pins(project)
    assert {CONDA_NAMES.get(name, name): pin for name, pin in pins.items()} == {
        CONDA_NAMES.get(name, name): wanted[CONDA_NAMES.get(name, name)] for name in pins
    }


def test_conda_brings_what_it_should_and_pip_the_rest(conda: list) -> None:
    names = {line.partition("=")[0] for line in conda if isinstance(line, str)}
    assert names == CONDA_ONLY | {"aiohttp", "jupyterlab", "python-graphviz", "pytorch", "pyzmq"}
    assert [line for line in conda if isinstance(line, dict)] == [{"pip": ["-e .[cpu,dev]"]}]


def test_conda_takes_a_python_that_pyproject_accepts(project: dict, conda: list) -> None:
    python = next(line for line in conda if isinstance(line, str) and line.startswith("python="))
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"]).groups()
    assert int(low) <= int(python.removeprefix("python=3.")) < int(high)


def test_lock_holds_every_pin_and_no_accelerator_wheel(project: dict) -> None:
    lock, extras = lock_pins(), project["optional-dependencies"]
    wanted = {**runtime_pins(project), **dict(line.split("==") for line in extras["dev"])}
    assert {name: lock.get(name) for name in wanted} == wanted
    assert not [name for name in lock if name.startswith(("mooncake", "nvidia", "cuda", "triton"))]
    assert not [name for name, pin in lock.items() if "+" in pin]


def imported(folders: list[str]) -> set[str]:
    """Top modules that these folders import, wherever in a file, but for the project's and Python's own."""
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    own = {"epdlab", *(path.stem for path in files)}
    found = set()
    for node in (node for path in files for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return {name.partition(".")[0] for name in found} - own - set(sys.stdlib_module_names)


def declared(lines: list[str]) -> set[str]:
    """Top modules of the pinned packages, as installed here."""
    pinned = {line.partition("==")[0] for line in lines}
    owners = metadata.packages_distributions().items()
    return {module for module, owner in owners if {re.sub(r"[-_.]+", "-", name).lower() for name in owner} & pinned}


def test_whatever_is_imported_is_declared(project: dict) -> None:
    """A package that comes only with another one is gone when that one drops it."""
    extras = project["optional-dependencies"]
    runtime = [*project["dependencies"], *extras["cpu"]]
    assert imported(["epdlab"]) - declared(runtime) <= {"sglang"}
    assert imported(["tests", "tools"]) - declared([*runtime, *extras["dev"]]) == set()


def test_python_range_is_the_same_everywhere(project: dict, bootstrap: ModuleType) -> None:
    low, high = bootstrap.PYTHON_MIN, bootstrap.PYTHON_END
    assert project["requires-python"] == f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"
    assert (doctor.PYTHON_MIN, doctor.PYTHON_END) == (low, high)


@pytest.mark.parametrize(
    ("driver", "variant"), [(None, "cpu"), ("535.183.01", "cuda12"), ("579.1", "cuda12"), ("580.65.06", "cuda13")]
)
def test_driver_decides_the_wheel(bootstrap: ModuleType, driver: str | None, variant: str) -> None:
    assert bootstrap.choose_variant(driver) == variant


def test_variant_can_be_forced_but_not_misspelt(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPDLAB_VARIANT", "cuda12")
    assert bootstrap.choose_variant(None) == "cuda12"
    monkeypatch.setenv("EPDLAB_VARIANT", "cuda11")
    with pytest.raises(bootstrap.SetupError, match="none of cpu, cuda12, cuda13"):
        bootstrap.choose_variant(None)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Tue Aug  5 20:00:00 UTC 2025",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (builder@host)",
    ],
)
def test_driver_version_is_read_from_the_kernel(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    (tmp_path / "version").write_text(f"{line}\nGCC version:  gcc version 12.2.0\n")
    monkeypatch.setattr(bootstrap, "NVIDIA", tmp_path / "version")
    assert bootstrap.driver_version() == "580.65.06"


def test_driver_version_falls_back_to_nvidia_smi(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bootstrap, "NVIDIA", tmp_path / "absent")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bootstrap.driver_version() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 570.10\necho 570.10\n")
    tool.chmod(0o755)
    assert bootstrap.driver_version() == "570.10"


@pytest.mark.parametrize(
    ("done", "asked", "current"),
    [("run", "run", True), ("dev", "run", True), ("run", "dev", False), ("dev", "dev", True)],
)
def test_setup_is_skipped_only_where_enough_was_done(
    bootstrap: ModuleType, done: str, asked: str, current: bool
) -> None:
    (bootstrap.VENV / "bin").mkdir(parents=True)
    (bootstrap.VENV / "bin/python").symlink_to(sys.executable)
    install_wheel(bootstrap.VENV, "mooncake_transfer_engine_non_cuda")
    bootstrap.STAMP.write_text(bootstrap.stamp(done, "cpu"))
    assert bootstrap.is_current(asked, "cpu") is current
    assert not bootstrap.is_current(asked, "cuda12")
    (bootstrap.ROOT / "pyproject.toml").write_text("changed")
    assert not bootstrap.is_current(asked, "cpu")


@pytest.mark.parametrize("trouble", ["second wheel", "broken folder"])
def test_a_damaged_mooncake_folder_is_set_up_anew(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    (bootstrap.VENV / "bin").mkdir(parents=True)
    (bootstrap.VENV / "bin/python").symlink_to(sys.executable)
    bootstrap.STAMP.write_text(bootstrap.stamp("run", "cpu"))
    install_wheel(bootstrap.VENV, "mooncake_transfer_engine_non_cuda", broken=trouble == "broken folder")
    if trouble == "second wheel":
        install_wheel(bootstrap.VENV, "mooncake_transfer_engine")
    commands: list[list[str]] = []
    monkeypatch.setattr(bootstrap, "step", lambda what, command: commands.append(command))
    assert not bootstrap.is_current("run", "cpu")
    bootstrap.drop_other_wheels("cpu")
    removed = ["mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"]
    assert [command[4:] for command in commands] == [["-y", *removed[trouble == "broken folder" :]]]


def test_who_is_not_root_is_told_what_to_install(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(bootstrap.SetupError, match=r"apt-get install -y libibverbs1 graphviz$"):
        bootstrap.apt_install(["libibverbs1", "graphviz"])


def test_a_failed_step_shows_the_end_of_its_output(bootstrap: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(bootstrap.SetupError, match="exit code 3"):
        bootstrap.step("a step", ["sh", "-c", "echo the reason; exit 3"])
    assert "the reason" in capfd.readouterr().err


def test_ci_script_is_executable_and_speaks_bash() -> None:
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", script], check=True)


def test_make_knows_every_target_the_readme_names() -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"demo", "test", "lab", "check"} <= named
    for target in named:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)
