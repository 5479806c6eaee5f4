"""Clients for Node.js, unchanged, against `moongate up`. Each script in the folder `node` is one client."""

import subprocess

import pytest

from tests.clients.conftest import MODEL, Fleet
from tests.clients.install import NODE, NODE_INSTALLED, no_node

SCRIPTS = sorted(path.name for path in NODE.glob("*.mjs"))
MISSING = no_node() or (None if NODE_INSTALLED.exists() else "run python tests/clients/install.py .venv-aiperf.")


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_client_finds_all_as_it_expects(fleet: Fleet, script: str) -> None:
    command = ["node", str(NODE / script), fleet.url, fleet.key, MODEL]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
