"""NVIDIA's aiperf, unchanged, measures `moongate up`."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL, Fleet

AIPERF = Path(__file__).resolve().parents[2] / ".venv-aiperf" / "bin" / "aiperf"
REQUESTS, OUTPUT = 48, 24


@pytest.mark.skipif(not AIPERF.exists(), reason="run python tests/clients/install.py .venv-aiperf.")
def test_it_measures_streams_without_an_error(fleet: Fleet, tmp_path: Path) -> None:
    told = {
        "--model-names": MODEL,
        "--url": fleet.url,
        "--api-key": fleet.key,
        "--endpoint-type": "chat",
        "--tokenizer": fleet.folder / MODEL,
        "--request-count": REQUESTS,
        "--concurrency": 8,
        "--prompt-input-tokens-mean": 200,
        "--output-tokens-mean": OUTPUT,
        "--ui": "none",
        "--output-artifact-dir": tmp_path,
    }
    options = [str(word) for option in told.items() for word in option]
    command = [str(AIPERF), "profile", "--streaming", "--no-gpu-telemetry", *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert not report["error_summary"]
    first, between, whole = (
        report[metric]["avg"] for metric in ("time_to_first_token", "inter_token_latency", "request_latency")
    )
    assert 0 < between < first < whole
    assert whole == pytest.approx(first + (OUTPUT - 1) * between, rel=0.05)
