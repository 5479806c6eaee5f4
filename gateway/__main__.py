"""The `moongate` command."""

import json
import logging
import sys
from pathlib import Path

import click
import uvicorn
import yaml

from connector.tokens import NoTokenizer
from gateway import config
from gateway.app import build
from policies.load import BadPolicy


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="moongate")
def main() -> None:
    """An OpenAI-compatible gateway for vLLM engines that share one Mooncake pool."""


@main.command(epilog="Example: moongate serve --config moongate.yaml")
@click.option("--config", "path", type=click.Path(path_type=Path), required=True, help="The YAML configuration.")
def serve(path: Path) -> None:
    """Run the gateway until SIGINT or SIGTERM; streams under way are finished first."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    settings = _load(path)
    try:
        app = build(settings)
    except (NoTokenizer, BadPolicy) as error:
        raise click.ClickException(str(error)) from error
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=settings.listen.host,
            port=settings.listen.port,
            loop="uvloop",
            http="httptools",
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=30,
        )
    )
    server.run()
    if not server.started:
        raise click.ClickException(f"could not listen on {settings.listen.host}:{settings.listen.port}")


@main.command(epilog="Example: moongate check moongate.yaml")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the tree as JSON.")
def check(path: Path, as_json: bool) -> None:
    """Validate a configuration and print what it amounts to, secrets masked."""
    tree = config.masked(_load(path))
    click.echo(json.dumps(tree, indent=2) if as_json else yaml.safe_dump(tree, sort_keys=False), nl=as_json)


def _load(path: Path) -> config.Config:
    try:
        return config.load(path)
    except config.ConfigError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
