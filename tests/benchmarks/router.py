"""vllm-router, which the gateway is measured beside, in a venv of its own since it pins what it needs."""

import subprocess
import venv
from pathlib import Path

from tests.benchmarks.stage import ROOT, say

VERSION = "vllm-router==0.1.17"


def install() -> Path:
    """The command, installed from PyPI where it is not there yet."""
    folder = ROOT / ".venv-router"
    stamp = folder / "installed"
    if not stamp.exists() or stamp.read_text() != VERSION:
        say(f"installing {VERSION} into {folder.name}")
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-qq"]
        subprocess.run([*pip, "install", VERSION], check=True)
        stamp.write_text(VERSION)
    return folder / "bin" / "vllm-router"


def command(upstream: str, policy: str, port: int, metrics: int) -> list[str | Path]:
    """What starts it before one engine."""
    return [
        install(),
        *("--worker-urls", upstream, "--policy", policy, "--log-level", "error"),
        *("--port", str(port), "--prometheus-port", str(metrics)),
    ]
