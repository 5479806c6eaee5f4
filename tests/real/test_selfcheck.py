"""What a running gateway finds out of real engines: that they agree, or in what they do not."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from .ask import CHAT, chat, metric, post, words
from .conftest import KEYS, Serve

SECONDS = 30.0
CHECKS: dict[str, Any] = {"self_check": {}}
REQUESTS = 20


def found(url: str, check: str, result: str) -> bool:
    """Whether a check came to this result, after at most 20 requests and some patience."""
    for number in range(REQUESTS):
        assert post(url, CHAT, chat(f"{number} {words(30)}", max_tokens=1), KEYS["team-a"]).status == 200
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if metric(url, "moongate_agreement_checks_total", check=check, result=result):
            return True
        time.sleep(0.2)
    return False


def test_healthy_engines_agree_in_everything(serve: Serve) -> None:
    url = serve(**CHECKS).url
    assert found(url, "keys", "agrees")
    assert found(url, "ids", "agrees")
    total = metric(url, "moongate_agreement_checks_total")
    assert metric(url, "moongate_agreement_checks_total", result="agrees") == total


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"hash_seed": "0"}, "seed"),
        ({"block_size": 64}, "block_size"),
        ({"vllm": "0.30"}, "tagging"),
        ({"keys": {"prefix": "another"}}, "key_prefix"),
    ],
    ids=str,
)
def test_a_wrong_belief_is_named(serve: Serve, model_folder: Path, wrong: dict[str, Any], kind: str) -> None:
    model = {"name": "tiny", "tokenizer": str(model_folder), "pool": "main", **wrong}
    assert found(serve(models=[model], **CHECKS).url, "keys", kind)


def test_another_template_is_named(serve: Serve, model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / model_folder.name
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "\n\n{{ 'Think.' }}")
    model = {"name": "tiny", "tokenizer": str(folder), "pool": "main"}
    url = serve(models=[model], **CHECKS).url
    assert found(url, "ids", "template")
    assert metric(url, "moongate_inexact_total", reason="template") > 0
