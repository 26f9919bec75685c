"""Sets the lab up in `.venv`: `python3 tools/bootstrap.py run|dev`, which `make demo` and `make test` call first.

Owns the virtual environment, the choice of Mooncake wheel and the apt packages, which it installs only as root. Does
nothing, at once, when nothing changed. Standard library only, without annotations or syntax an older Python 3 cannot
read, so that such a one gets a message instead of a syntax error.
"""

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from json import loads
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP, LOG = VENV / "epdlab-setup.txt", VENV / "epdlab-setup.log"
INPUTS = ("pyproject.toml", "requirements.lock", "tools/bootstrap.py")
PYTHON_MIN, PYTHON_END = (3, 11), (3, 14)
WHEELS = {
    "cpu": "mooncake_transfer_engine_non_cuda",
    "cuda12": "mooncake_transfer_engine",
    "cuda13": "mooncake_transfer_engine_cuda13",
}
NVIDIA = Path("/proc/driver/nvidia/version")
APT = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", "DPkg::Lock::Timeout=300")
CUDA13_DRIVER = 580  # first driver series that runs CUDA 13


class SetupError(Exception):
    """Set-up cannot go on; the message is one line that names the mend."""


def main(argv):
    """Set up for `run` (the lab) or `dev` (its tests too); 0 when all is in place."""
    scope = argv[1] if len(argv) == 2 else ""
    if scope not in ("run", "dev"):
        print("usage: bootstrap.py run|dev", file=sys.stderr)
        return 2
    try:
        use_supported_python()
        variant = choose_variant(driver_version())
        if is_current(scope, variant):
            return 0
        set_up(scope, variant)
    except SetupError as error:
        print(f"[setup] {error}", file=sys.stderr)
        return 1
    return 0


def set_up(scope, variant):
    """System packages, environment, Python packages; the stamp comes last, so a broken set-up is tried again."""
    say(f"Python {sys.version.split()[0]}, Mooncake for {variant}, into .venv")
    install_system_packages(scope, doctor_lacks(sys.executable))
    make_venv()
    extras = f"{variant},dev" if scope == "dev" else variant
    drop_other_wheels(variant)
    pip = [str(VENV / "bin/python"), "-m", "pip"]
    step(f"pip installs .[{extras}]", [*pip, "install", "-c", "requirements.lock", "-e", f".[{extras}]"])
    install_system_packages("run", doctor_lacks(VENV / "bin/python"))  # the wheel may link more than the system offers
    for lack in doctor_lacks(VENV / "bin/python"):
        if lack["needed"]:
            raise SetupError(f"{lack['name']}: {lack['problem']}; mend: {lack['mend']}")
    STAMP.write_text(stamp(scope, variant))
    say("done")


def use_supported_python():
    """Go on under a Python that Mooncake has wheels for: this one, or another on the PATH."""
    if sys.platform != "linux":
        raise SetupError("Mooncake has wheels for Linux only: use a Linux machine, WSL or a container")
    if PYTHON_MIN <= sys.version_info[:2] < PYTHON_END:
        return
    for minor in range(PYTHON_END[1] - 1, PYTHON_MIN[1] - 1, -1):
        name = f"python3.{minor}"
        if shutil.which(name) and subprocess.run([name, "-c", ""], capture_output=True).returncode == 0:
            os.execvp(name, [name, *sys.argv])
    wanted = f"3.{PYTHON_MIN[1]} to 3.{PYTHON_END[1] - 1}"
    raise SetupError(f"Python {wanted} is needed, this is {sys.version.split()[0]}: install one, or set PYTHON=")


def driver_version():
    """The NVIDIA driver's version, from the kernel or else from nvidia-smi; None without a driver."""
    if NVIDIA.exists():
        found = re.search(r"Module.*?\s(\d+\.[\d.]+)", NVIDIA.read_text())
        return found and found.group(1)
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True)
    return answer.stdout.split()[0] if answer.returncode == 0 and answer.stdout.strip() else None


def choose_variant(driver):
    """The extra to install; EPDLAB_VARIANT overrides what the driver says."""
    asked = os.environ.get("EPDLAB_VARIANT")
    if asked:
        if asked not in WHEELS:
            raise SetupError(f"EPDLAB_VARIANT={asked} is none of {', '.join(WHEELS)}")
        return asked
    if driver is None:
        return "cpu"
    return "cuda13" if int(driver.partition(".")[0]) >= CUDA13_DRIVER else "cuda12"


def stamp(scope, variant):
    """What a finished set-up is known by: its inputs, its wheel and how much of it was asked for."""
    inputs = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in INPUTS)).hexdigest()
    return f"{inputs} {variant} {scope}\n"


def is_current(scope, variant):
    """Whether a set-up of at least this scope stands, with its wheel alone and a Python that still starts."""
    if not STAMP.exists() or not (VENV / "bin/python").exists():
        return False
    accepted = {stamp(scope, variant), stamp("dev", variant)}
    return STAMP.read_text() in accepted and set(wheels_present()) == {WHEELS[variant]}


def make_venv():
    """Create `.venv`, or create it anew where its Python is gone or has no pip."""
    python = VENV / "bin/python"
    if python.exists() and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return
    answer = subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], capture_output=True, text=True)
    if answer.returncode != 0:
        raise SetupError(f"{sys.executable} -m venv failed: {(answer.stderr or answer.stdout).strip()}")


def wheels_present():
    """The Mooncake wheels pip has in `.venv`, one name each; nothing where their common folder is broken."""
    found = [path.name.partition("-")[0] for path in VENV.glob("lib/python3.*/site-packages/mooncake_*.dist-info")]
    return found if any(VENV.glob("lib/python3.*/site-packages/mooncake/engine.so")) else []


def drop_other_wheels(variant):
    """Uninstall every Mooncake wheel unless the wanted one stands alone: they share one folder."""
    found = {path.name.partition("-")[0] for path in VENV.glob("lib/python3.*/site-packages/mooncake_*.dist-info")}
    if found and set(wheels_present()) != {WHEELS[variant]}:
        names = [name.replace("_", "-") for name in sorted(found)]
        step(f"pip removes {', '.join(names)}", [str(VENV / "bin/python"), "-m", "pip", "uninstall", "-y", *names])


def install_system_packages(scope, lacks):
    """Install what is lacking, all in one go; what only the tests use may stay absent, with a word about it."""
    venv = [] if importlib.util.find_spec("ensurepip") else [f"python3.{sys.version_info[1]}-venv"]
    apt_install(venv + [lack["package"] for lack in lacks if lack["needed"] and lack["package"]])
    optional = [lack for lack in lacks if not lack["needed"] and lack["package"]]
    for lack in optional if scope == "dev" else ():
        try:
            apt_install([lack["package"]])
        except SetupError as error:
            say(f"{lack['problem']} ({error})")


def doctor_lacks(python):
    """What `epdlab doctor` finds lacking, asked under the given Python; it needs no package to answer."""
    program = "import runpy; print(runpy.run_path('epdlab/doctor.py')['collect']().to_json())"
    outside_conda = {name: value for name, value in os.environ.items() if name != "CONDA_PREFIX"}
    answer = subprocess.run([python, "-c", program], cwd=ROOT, env=outside_conda, capture_output=True, text=True)
    if answer.returncode != 0:
        raise SetupError(f"the doctor failed: {answer.stderr.strip()}")
    return loads(answer.stdout)["lacks"]


def apt_install(packages):
    """apt-get as root; for anyone else, one line that says what to install."""
    if not packages:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        by_hand = f"apt-get install -y {' '.join(packages)}" if shutil.which("apt-get") else " ".join(packages)
        raise SetupError(f"install as root, then run make again: {by_hand}")
    apt_update()
    step(f"apt installs {' '.join(packages)}", [*APT, "install", "-y", "--no-install-recommends", *packages])


@functools.lru_cache(maxsize=None)  # noqa: UP033 - functools.cache is newer than the Pythons this must answer
def apt_update():
    """Refresh apt's lists, once in a set-up."""
    step("apt-get update", [*APT, "update"])


def step(what, command):
    """Run a command, its output kept in the log; show the end of it only if it fails."""
    print(f"[setup] {what} ...", end=" ", flush=True)
    start = time.monotonic()
    LOG.parent.mkdir(exist_ok=True)
    with LOG.open("a") as log:
        code = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log).returncode
    print("failed" if code else f"{time.monotonic() - start:.0f} s", flush=True)
    if code:
        print("\n".join(LOG.read_text().splitlines()[-15:]), file=sys.stderr)
        raise SetupError(f"{what}: exit code {code}; the whole output is in {LOG.relative_to(ROOT)}")


def say(text):
    """One line of progress."""
    print(f"[setup] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
