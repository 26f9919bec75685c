"""What this machine offers the lab, and the command that mends each lack.

Owns the list of what is needed from the operating system and from pip. Imports neither torch nor Mooncake: versions
come from package metadata, and what only loading can tell is tried in a child process. Nothing is installed here.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from json import dumps, loads
from pathlib import Path
from types import MappingProxyType
from typing import Any

PYTHON_MIN, PYTHON_END = (3, 11), (3, 14)
VARIANTS = MappingProxyType(
    {
        "mooncake-transfer-engine-non-cuda": "non-cuda",
        "mooncake-transfer-engine": "cuda12",
        "mooncake-transfer-engine-cuda13": "cuda13",
    }
)
INFINIBAND = Path("/sys/class/infiniband")
NVIDIA = Path("/proc/driver/nvidia/version")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True, slots=True)
class Package:
    """The name of one system package under each package manager."""

    apt: str
    dnf: str
    conda: str


LIBRARIES: Mapping[str, Package] = MappingProxyType(
    {
        "libibverbs.so.1": Package("libibverbs1", "libibverbs", "rdma-core"),
        "libnuma.so.1": Package("libnuma1", "numactl-libs", "libnuma"),
        "libcurl.so.4": Package("libcurl4", "libcurl", "libcurl"),
    }
)
CUDA_LIBRARIES: Mapping[str, Package] = MappingProxyType(
    {"libmlx5.so.1": Package("ibverbs-providers", "libibverbs", "rdma-core")}
)
GRAPHVIZ = Package("graphviz", "graphviz", "graphviz")
BROWSER = Package("chromium", "chromium", "chromium")


@dataclass(frozen=True, slots=True)
class Lack:
    """Something missing or wrong.

    Attributes:
        needed: the demo cannot run without it.
        package: the system package that brings it, by the name this machine's package manager knows.
    """

    name: str
    problem: str
    mend: str
    needed: bool = True
    package: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}; mend: {self.mend}"


@dataclass(frozen=True, slots=True)
class Report:
    """What was found. `None` stands for what is not there; `memory_gib` is all memory, in GiB."""

    python: str
    mooncake_variant: str | None
    mooncake_version: str | None
    libibverbs: bool
    dot: str | None
    chromium: str | None
    torch: str | None
    device: str
    rdma_devices: tuple[str, ...]
    transport: str
    cores: int
    memory_gib: float
    lacks: tuple[Lack, ...]

    @property
    def ok(self) -> bool:
        """Whether the demo can run here."""
        return not any(lack.needed for lack in self.lacks)

    def to_json(self) -> str:
        """One JSON object: `ok`, the fields of this class, and the lacks with their mends."""
        return dumps({"ok": self.ok, **asdict(self)})


def collect() -> Report:
    """Look at this machine. Takes well under a second; starts two short child processes at most."""
    wheels = installed_wheels()
    probe = _probe(wheels)
    devices = rdma_devices()
    torch = _version("torch")
    device, device_lacks = torch_device()
    dot, chromium = shutil.which("dot"), next(filter(None, map(shutil.which, CHROMIUM)), None)
    lacks = [*_python_lacks(), *_package_lacks(), *_wheel_lacks(wheels), *_library_lacks(probe["missing"])]
    if len(wheels) == 1 and not probe["missing"] and probe["error"]:
        lacks.append(_import_lack(probe["error"]))
    lacks += device_lacks
    if dot is None:
        lacks.append(_system_lack("dot", "Graphviz's dot is not on the PATH, and the diagrams need it", GRAPHVIZ))
    if chromium is None:
        lacks.append(_system_lack("chromium", "no Chromium, so the browser test skips", BROWSER, needed=False))
    return Report(
        python=sys.version.split()[0],
        mooncake_variant=" and ".join(VARIANTS.get(name, name) for name in wheels) or None,
        mooncake_version=" and ".join(wheels.values()) or None,
        libibverbs="libibverbs.so.1" not in probe["missing"],
        dot=dot,
        chromium=chromium,
        torch=torch,
        device=device,
        rdma_devices=tuple(devices),
        transport="rdma" if any(devices.values()) else "tcp",
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        lacks=tuple(lacks),
    )


def run(json: bool) -> int:
    """Print the report, as one JSON object or as text.

    Returns:
        0 if the demo can run here, else 1.
    """
    report = collect()
    print(report.to_json() if json else "\n".join(_lines(report)))
    return 0 if report.ok else 1


def installed_wheels() -> dict[str, str]:
    """Version by name of every Mooncake wheel installed, any variant; more than one is a defect."""
    names = ((str(dist.metadata["Name"] or "").lower(), dist.version) for dist in _mooncake_distributions())
    return dict(sorted(names))


def rdma_devices(root: Path = INFINIBAND) -> dict[str, bool]:
    """The RDMA devices the kernel knows, and whether any port of each is active."""
    if not root.is_dir():
        return {}
    return {device.name: any(map(_port_active, device.glob("ports/*/state"))) for device in sorted(root.iterdir())}


def torch_device() -> tuple[str, list[Lack]]:
    """The device torch will use, `cuda` or `cpu`, and why a GPU that is there is not used."""
    has_driver = NVIDIA.exists() or shutil.which("nvidia-smi") is not None
    cuda = _torch_cuda()
    if not has_driver or _version("torch") is None:
        return "cpu", []
    if cuda is None:
        mend = "install a CUDA build of torch"
        return "cpu", [Lack("gpu", "there is an NVIDIA driver, but torch is a CPU build", mend, needed=False)]
    driver, count = _run_child(_CUDA_PROBE, []).get("found", (0, 0))
    if count and driver >= int(cuda.partition(".")[0]) * 1000:
        return "cuda", []
    problem = f"torch is built for CUDA {cuda}; the driver offers {count} GPUs and CUDA {driver // 1000}"
    return "cpu", [Lack("gpu", problem, "update the driver, or install a build of torch it can run", needed=False)]


def bundled_cudart() -> list[Path]:
    """The CUDA runtimes that pip packages bring: on no loader path, so they are loaded before Mooncake."""
    return [path for folder in sys.path for path in Path(folder or ".").glob("nvidia/*/lib/libcudart.so.*")]


def _mooncake_distributions() -> Iterator[importlib.metadata.Distribution]:
    for folder in dict.fromkeys(sys.path):
        for entry in Path(folder or ".").glob("mooncake_transfer_engine*.dist-info"):
            yield importlib.metadata.Distribution.at(entry)


def _port_active(state: Path) -> bool:
    return "ACTIVE" in state.read_text()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """The CUDA release torch was built for, read from its version file; None for a CPU build."""
    if _version("torch") is None:
        return None
    text = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
    found = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE)
    return found.group(1) if found else None


_MOONCAKE_PROBE = """
import ctypes, json, sys
libraries, bundled = json.loads(sys.argv[1])
missing = []
for name in libraries:
    try:
        ctypes.CDLL(name)
    except OSError:
        missing.append(name)
error = None
try:
    for name in bundled:
        ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
    import mooncake.engine
except Exception as problem:
    error = str(problem)
print(json.dumps({"missing": missing, "error": error}))
"""

_CUDA_PROBE = """
import ctypes, json
cuda, driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), ctypes.c_int(0)
cuda.cuDriverGetVersion(ctypes.byref(driver))
if cuda.cuInit(0) == 0:
    cuda.cuDeviceGetCount(ctypes.byref(count))
print(json.dumps({"found": [driver.value, count.value]}))
"""


def _run_child(program: str, argument: object) -> dict[str, Any]:
    """The JSON object a child prints; `{"error": ...}` where it died without one."""
    command = [sys.executable, "-c", program, dumps(argument)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return {"error": "no answer within 60 s"}
    if child.returncode == 0:
        answer: dict[str, Any] = loads(child.stdout.splitlines()[-1])
        return answer
    if child.returncode < 0:
        return {"error": f"the process died of {signal.Signals(-child.returncode).name}"}
    return {"error": (child.stderr.strip().splitlines() or ["no reason given"])[-1]}


def _probe(wheels: Mapping[str, str]) -> dict[str, Any]:
    """Which system libraries do not load, and why `mooncake.engine` does not import, if so."""
    needs_cuda = any(VARIANTS.get(name) in ("cuda12", "cuda13") for name in wheels)
    libraries = [*LIBRARIES, *(CUDA_LIBRARIES if needs_cuda else ())]
    bundled = [str(path) for path in bundled_cudart()] if needs_cuda else []
    return {"missing": [], **_run_child(_MOONCAKE_PROBE, [libraries, bundled])}


def _python_lacks() -> list[Lack]:
    if PYTHON_MIN <= sys.version_info[:2] < PYTHON_END:
        return []
    wanted = f"{PYTHON_MIN[0]}.{PYTHON_MIN[1]} to {PYTHON_END[0]}.{PYTHON_END[1] - 1}"
    return [Lack("python", f"this is {sys.version.split()[0]}, Mooncake has wheels for {wanted}", f"install {wanted}")]


def _package_lacks() -> list[Lack]:
    """Python packages that are absent (needed), or present in another version than pinned (told, not needed)."""
    lacks = []
    for name, pinned in _own_pins().items():
        found = _version(name)
        if found is None:
            lacks.append(Lack(name, "not installed", f"{_pip()} install {name}=={pinned}"))
        elif found.partition("+")[0] != pinned:
            problem = f"{found} is installed, {pinned} is pinned"
            lacks.append(Lack(name, problem, f"{_pip()} install {name}=={pinned}", needed=False))
    return lacks


def _own_pins(with_extras: bool = False) -> dict[str, str]:
    """What epdlab requires, from its own metadata; empty when it runs without being installed."""
    try:
        required = importlib.metadata.requires("epdlab") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    lines = (line.partition(";")[0].strip() for line in required if with_extras or ";" not in line)
    return dict(line.split("==") for line in lines)


def _wheel_lacks(wheels: Mapping[str, str]) -> list[Lack]:
    if not wheels:
        return [Lack("mooncake", "no Mooncake wheel is installed", f"{_pip()} install {_wanted_wheel(wheels)}")]
    if len(wheels) == 1:
        return []
    problem = f"{len(wheels)} wheels ({', '.join(wheels)}) share the folder `mooncake` and overwrite each other"
    mend = f"{_pip()} uninstall -y {' '.join(wheels)} && {_pip()} install {_wanted_wheel(wheels)}"
    return [Lack("mooncake", problem, mend)]


def _wanted_wheel(wheels: Mapping[str, str]) -> str:
    """The one wheel to keep: a CUDA one if there is a driver and one was installed, else the one without CUDA."""
    cuda = [name for name in wheels if VARIANTS.get(name) in ("cuda12", "cuda13")]
    name = cuda[-1] if cuda and NVIDIA.exists() else "mooncake-transfer-engine-non-cuda"
    return _pinned(name)


def _pinned(name: str) -> str:
    version = _own_pins(with_extras=True).get(name)
    return f"{name}=={version}" if version else name


def _library_lacks(missing: Sequence[str]) -> list[Lack]:
    packages = {**LIBRARIES, **CUDA_LIBRARIES}
    return [_system_lack(name.partition(".")[0], f"{name} does not load", packages[name]) for name in missing]


def _import_lack(error: str) -> Lack:
    """What a failed import of `mooncake.engine` means. All system libraries were found to load before."""
    problem = f"mooncake.engine does not import: {error}"
    cudart = re.search(r"libcudart\.so\.(\d+)", error)
    if cudart:
        package = "nvidia-cuda-runtime-cu12" if cudart.group(1) == "12" else "nvidia-cuda-runtime"
        return Lack("mooncake", problem, f"{_pip()} install {_pinned(package)}")
    wheels = installed_wheels()
    if "libcuda.so" in error:
        plain = _pinned("mooncake-transfer-engine-non-cuda")
        mend = f"{_pip()} uninstall -y {' '.join(wheels)} && {_pip()} install {plain}"
        return Lack("mooncake", f"{problem} (a CUDA wheel without an NVIDIA driver)", mend)
    return Lack("mooncake", problem, f"{_pip()} install --force-reinstall --no-deps {_wanted_wheel(wheels)}")


def _system_lack(name: str, problem: str, package: Package, needed: bool = True) -> Lack:
    """A lack that this machine's package manager mends: conda inside a conda environment, else apt or dnf."""
    if "CONDA_PREFIX" in os.environ:
        return Lack(name, problem, f"conda install -c conda-forge {package.conda}", needed, package.conda)
    sudo = "" if os.geteuid() == 0 else "sudo "
    if shutil.which("dnf") and not shutil.which("apt-get"):
        return Lack(name, problem, f"{sudo}dnf install -y {package.dnf}", needed, package.dnf)
    return Lack(name, problem, f"{sudo}apt-get install -y {package.apt}", needed, package.apt)


def _pip() -> str:
    """pip of this interpreter, by a path that can be pasted from the current folder."""
    python = Path(sys.executable)
    here = Path.cwd()
    return f"{python.relative_to(here) if python.is_relative_to(here) else python} -m pip"


def _lines(report: Report) -> Iterator[str]:
    mooncake = f"{report.mooncake_version} ({report.mooncake_variant})" if report.mooncake_version else None
    rows = {
        "python": report.python,
        "mooncake": mooncake,
        "libibverbs": "loads" if report.libibverbs else None,
        "dot": report.dot,
        "chromium": report.chromium,
        "torch": report.torch,
        "device": report.device,
        "RDMA devices": ", ".join(report.rdma_devices) or "none",
        "transport": report.transport,
        "machine": f"{report.cores} cores, {report.memory_gib} GiB",
    }
    for name, value in rows.items():
        yield f"{name:<13}{value or 'missing'}"
    for lack in report.lacks:
        yield f"{'LACK' if lack.needed else 'note'}  {lack}"
    yield "The demo can run here." if report.ok else "The demo cannot run here until each LACK is mended."
