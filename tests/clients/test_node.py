"""Clients for Node.js, unchanged, against `moongate up`. Each script in the folder `node` says what it expects."""

import subprocess

import pytest

from tests.clients.conftest import MODEL, Fleet, Kill
from tests.clients.install import NODE, NODE_INSTALLED, no_node

MISSING = no_node() or (None if NODE_INSTALLED.exists() else "run python tests/clients/install.py .venv-aiperf.")
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.mark.parametrize("client", ["openai", "ai", "anthropic"])
def test_a_client_finds_all_as_it_expects(fleet: Fleet, client: str) -> None:
    command = ["node", str(NODE / f"{client}.mjs"), fleet.url, fleet.key, MODEL]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("client", ["openai", "ai", "anthropic"])
def test_a_client_is_told_that_its_engine_died(doomed: Fleet, kill: Kill, client: str) -> None:
    command = ["node", str(NODE / "dying.mjs"), doomed.url, doomed.key, MODEL, client]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        kill(ran.stdout.readline())
        out, told = ran.communicate(timeout=120)
    assert ran.returncode == 0, out + told
