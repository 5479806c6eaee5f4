"""The README's code blocks run, one after the other, as a reader would run them.

Doubles stand for the engines and the master; ports and folders that the README makes up are replaced
by those of the test.
"""

import asyncio
import hashlib
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import yaml

from gateway.explain import Blocks, EngineTold, Explanation, PlacementTold, PolicyTold, PoolTold, PromptTold
from tests.double import Engine, Master
from tests.gateway.test_up import needs_a_master
from tests.readme import README
from tests.real.stack import free_port


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


async def shell(script: str) -> str:
    """What a script prints. It must succeed."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-euo", "pipefail", "-c", script, cwd=README.parent, stdout=-1, stderr=-2
    )
    async with asyncio.timeout(300):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


@asynccontextmanager
async def background(command: str, log: Path) -> AsyncIterator[None]:
    """A command that runs until the block ends; it must then end by itself on SIGTERM."""
    environment = {**os.environ, "SALT_SECRET": "a secret"}
    script = f"exec {command} >{log} 2>&1"
    process = await asyncio.create_subprocess_exec("bash", "-c", script, cwd=README.parent, env=environment)
    try:
        yield
    finally:
        process.terminate()
        async with asyncio.timeout(20):
            assert await process.wait() == 0


async def ready(url: str) -> None:
    async with asyncio.timeout(60), httpx.AsyncClient(trust_env=False) as client:
        while True:
            try:
                if (await client.get(f"{url}/ready")).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


@needs_a_master
async def test_the_first_steps(tmp_path: Path, tokenizer_folder: Path) -> None:
    port = free_port()
    async with Engine("qwen3") as first, Engine("qwen3") as second, Master() as master:
        replaced = {
            "http://127.0.0.1:8101": first.url,
            "http://127.0.0.1:8102": second.url,
            "http://127.0.0.1:9003": master.url,
            "http://127.0.0.1:8000": f"http://127.0.0.1:{port}",
            "deploy/up --demo": f"deploy/up --demo --port {free_port()}",
            "/models/Qwen3-8B": str(tokenizer_folder),
            "moongate.yaml": str(tmp_path / "moongate.yaml"),
            ".venv/bin/": f"{Path(sys.executable).parent}/",
        }

        def here(text: str) -> str:
            for old, new in replaced.items():
                text = text.replace(old, new)
            return text

        [config] = blocks("yaml")
        (tmp_path / "moongate.yaml").write_text(here(config) + f"listen: {{port: {port}}}\n")
        demo, up, hashing, serving, asking, explaining, testing = (here(block) for block in blocks("sh"))
        assert "exactly as predicted" in await shell(demo)
        assert up == "deploy/up\n"  # tests/gateway/test_up.py runs it

        digest = (await shell(hashing)).split()[0]
        assert digest == hashlib.sha256(b"moongate-example").hexdigest()
        assert f"sha256: {digest}" in config

        secret, check, serve = serving.splitlines()
        async with background(serve, tmp_path / "gateway.log"):
            await ready(f"http://127.0.0.1:{port}")
            assert '"finish_reason":"stop"' in await shell(asking)
            assert "would get it (cost: " in " ".join((await shell(explaining)).split())

        shown = yaml.safe_load(await shell(f"{secret}\n{check}"))
        assert shown["secret"] == "**********"
        assert "deploy/test --long" in await shell(testing)


def test_the_python_blocks_run() -> None:
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


def test_every_kind_of_metric_has_its_row() -> None:
    text = README.read_text()
    for name in ("requests_total", "ttft_seconds", "engine_up", "prompt_cache_bytes"):
        assert f"| moongate_{name} |" in text


def test_every_member_of_an_explanation_has_its_row() -> None:
    text = README.read_text().split("<!-- explanation -->")[1].split("<!-- /explanation -->")[0]
    names = set(re.findall(r"\w+", " ".join(line.split("|")[1] for line in text.splitlines() if line)))
    parts = (Explanation, PromptTold, Blocks, PoolTold, EngineTold, PolicyTold, PlacementTold)
    assert names - {"member"} == {name for part in parts for name in part.__struct_fields__}
