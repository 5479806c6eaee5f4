"""`moongate up` with real vLLM engines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.processes import free_port

from .stack import CPU_ENVIRONMENT, ENGINE_PYTHON


@pytest.mark.long
def test_the_demo_on_real_engines(model_folder: Path) -> None:
    arguments = ["--enforce-eager", "--max-model-len=8192", "--max-num-seqs=16"]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "gateway", "up", "--demo", "--port", str(free_port()), "--engine", "vllm"),
            *("--vllm-python", ENGINE_PYTHON, "--model", model_folder),
            *(f"--engine-arg={argument}" for argument in arguments),
        ],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, **CPU_ENVIRONMENT},
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "20 of 20 turns exactly as predicted" in ended.stdout
