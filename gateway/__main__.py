"""The `moongate` command."""

import asyncio
import gc
import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import click
import uvicorn
import yaml

from connector.tokens import NoTokenizer
from gateway import config, explanation
from gateway.app import BadAuthority, BadTemplate, House, build
from gateway.commands import NotInstalled
from gateway.demo import DemoFailed, play
from gateway.diagnosis import lines, tree
from gateway.doctor import examine
from gateway.explanation import CannotAsk
from gateway.processes import NotReady, cannot_listen
from gateway.replay import NoPicture, artist, as_tree, cases_of, played, table, write
from gateway.simulation import CannotReplay, Lost, Scene, Slowed
from gateway.traffic import Agents, BadTraffic
from gateway.up import CannotStart, Stopped, Wanted, running, wait, welcome
from policies.load import BadPolicy

QUIET = 2.0
"""Seconds after which the doctor tells of its progress."""
PROGRESS_STEPS = 100
"""Requests of a replay after which its bar is drawn anew."""


class Unusable(click.ClickException):
    """There is nothing to report; 1 is what a report says."""

    exit_code = 2


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
    house = _build(settings, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:  # a connection is a file; the usual 1024 are soon used up
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host, port = settings.listen.host, settings.listen.port
    if port and (trouble := cannot_listen(host, port)):
        raise click.ClickException(f"cannot listen on port {port} of {host}: {trouble}; listen.port names another")
    gc.collect()
    gc.freeze()  # what is there now stays: no collection has to walk through it again
    server = uvicorn.Server(
        uvicorn.Config(
            house.surface,
            host=settings.listen.host,
            port=settings.listen.port,
            loop="uvloop",
            http=house.front,
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=30,
        )
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn handles them, then raises them once more
    server.run()


@main.command(epilog="Example: moongate check moongate.yaml")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the tree as JSON.")
def check(path: Path, as_json: bool) -> None:
    """Validate a configuration, its tokenizers and its policy too, and print what it amounts to, secrets masked."""
    settings = _load(path)
    _build(settings, path)
    tree = config.masked(settings)
    click.echo(json.dumps(tree, indent=2) if as_json else yaml.safe_dump(tree, sort_keys=False), nl=as_json)


@main.command(epilog="Example: moongate doctor moongate.yaml")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, 600, min_open=True),
    default=10.0,
    show_default=True,
    help="Seconds for each answer, and for blocks to come up in the pool.",
)
def doctor(path: Path, as_json: bool, timeout: float) -> None:
    """Ask everything a configuration names whether it does what the gateway believes, and say what to change.

    Each engine gets some fifteen short prompts that are made for this. The exit status is 0 where all
    agrees, 1 where something is wrong, 2 where the configuration cannot be used.
    """
    began = time.monotonic()

    def say(text: str) -> None:
        if time.monotonic() - began > QUIET:
            click.echo(text, err=True)

    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        report = asyncio.run(examine(config.load(path), patience=timeout, say=say))
    except (config.ConfigError, NoTokenizer, BadAuthority, BadTemplate) as error:
        raise Unusable(str(error)) from error
    click.echo(json.dumps(tree(report), indent=2) if as_json else "\n".join(lines(report)))
    sys.exit(0 if report.healthy else 1)


@main.command(epilog="Example: moongate explain request.json --tenant team-a")
@click.argument("file", type=click.File("rb"))
@click.option("--gateway", default="http://127.0.0.1:8000", show_default=True, help="URL of the running gateway.")
@click.option(
    "--admin-key-env",
    "variable",
    default="MOONGATE_ADMIN_KEY",
    show_default=True,
    help="The environment variable that holds admin.key, where the gateway has one.",
)
@click.option("--tenant", help="Whose request it is. Not needed where there is one tenant.")
@click.option("--session", help="What the client would send as its session.")
@click.option("--path", default="/v1/chat/completions", show_default=True, help="The endpoint it would be sent to.")
@click.option("--ids", is_flag=True, help="With --json: all token ids and block hashes.")
@click.option("--json", "as_json", is_flag=True, help="Print the gateway's answer as JSON.")
def explain(*, file: BinaryIO, gateway: str, variable: str, as_json: bool, **asked: Any) -> None:
    """Say where a request would go, and why, without sending it.

    FILE holds the request's body as a client would send it; - is standard input. A running gateway is asked, on
    its host or with its admin key. The exit status is 0 where the request would be placed, 1 where no engine would
    get it, 2 where the gateway could not be asked.
    """
    try:
        question = explanation.question(file.read(), getattr(file, "name", "standard input"), **asked)
        answer = explanation.ask(gateway, question, os.environ.get(variable))
        told = explanation.read(answer)
    except CannotAsk as error:
        raise Unusable(str(error)) from error
    click.echo(json.dumps(json.loads(answer), indent=2) if as_json else "\n".join(explanation.lines(told)))
    sys.exit(0 if told.placement is not None else 1)


@main.command(epilog="Example: moongate up --engines 3, or moongate up --demo")
@click.option("--engine", "kind", type=click.Choice(["simulated", "vllm"]), default="simulated", help="Kind of engine.")
@click.option("--engines", type=click.IntRange(1, 64), default=2, show_default=True, help="Engines that do everything.")
@click.option("--prefill", type=click.IntRange(0, 64), default=0, help="Engines that prefill, in place of --engines.")
@click.option("--decode", type=click.IntRange(0, 64), default=0, help="Engines that decode, in place of --engines.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the gateway.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port of the gateway.")
@click.option("--model", type=click.Path(path_type=Path), help="Model folder. Simulated engines need none.")
@click.option("--block-size", type=click.IntRange(1), default=32, show_default=True, help="Tokens in a block.")
@click.option("--policy", help="Placement policy; the default suits the engines' roles.")
@click.option(
    "--vllm-python",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=sys.executable,
    help="The interpreter that has vLLM, for --engine vllm.",
)
@click.option("--engine-arg", "more", multiple=True, help="An argument for every engine, as it stands.")
@click.option("--demo", is_flag=True, help="Play two conversations over the fleet, print what was known, and end.")
def up(*, kind: str, demo: bool, policy: str | None, vllm_python: Path, more: tuple[str, ...], **given: Any) -> None:
    """Start a Mooncake master, engines and the gateway; Ctrl-C ends all of them.

    The engines are simulated unless --engine vllm is given: they answer with made-up words, but hash,
    cache, store into the real pool and publish events as vLLM does.
    """
    if demo and policy is None and not given["prefill"]:
        policy = "round_robin"  # so that conversations change engines and the pool's part shows
    wanted = Wanted(
        kind="vllm" if kind == "vllm" else "simulated",
        policy=policy,
        python=vllm_python,
        engine_arguments=more,
        **given,
    )
    try:
        with running(wanted, click.echo) as fleet:
            if demo:
                play(fleet, click.echo)
            else:
                click.echo(welcome(fleet))
                wait(fleet, click.echo)
    except Stopped:
        click.echo("ended")
    except (BadPolicy, CannotStart, NotInstalled, NotReady, DemoFailed) as error:
        raise click.ClickException(str(error)) from error


def _settings(kind: type[Scene | Agents]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option for each field that says what it is."""

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        for field in reversed(fields(kind)):
            if "says" in field.metadata:
                option = click.option(
                    f"--{field.name.replace('_', '-')}",
                    type=_range(field.default, positive=field.metadata["positive"]),
                    is_flag=isinstance(field.default, bool),
                    default=field.default,
                    show_default=True,
                    help=field.metadata["says"],
                )
                command = option(command)
        return command

    return with_options


def _range(default: object, *, positive: bool) -> Any:
    """Click's type for a setting."""
    if isinstance(default, bool):
        return click.BOOL
    return click.IntRange(int(positive)) if isinstance(default, int) else click.FloatRange(0, min_open=positive)


def _happening(kind: Callable[..., Lost | Slowed], *parts: type[float]) -> Callable[..., tuple[Lost | Slowed, ...]]:
    """What reads an option's numbers, with colons between them."""

    def read(_: click.Context, option: click.Parameter, values: Sequence[str]) -> tuple[Lost | Slowed, ...]:
        try:
            return tuple(
                kind(*(part(number) for part, number in zip(parts, value.split(":"), strict=True))) for value in values
            )
        except ValueError as error:
            raise click.BadParameter(f"it must be numbers, as in {option.metavar}") from error

    return read


@main.command(epilog="Example: moongate replay agent --policy round_robin,cache_aware --compare pool=0,30000")
@click.argument("trace")
@click.option("--policy", "policies", default="round_robin,cache_aware", show_default=True, help="Several with commas.")
@click.option("--compare", multiple=True, metavar="OPTION=VALUE,...", help="Every policy with each value of an option.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="A folder for replay.json and replay.png."
)
@click.option(
    "--lost",
    multiple=True,
    metavar="SECOND:SHARE",
    callback=_happening(Lost, float, float),
    help="The pool loses a share of its blocks, 0 to 1.",
)
@click.option(
    "--slowed",
    multiple=True,
    metavar="SECOND:ENGINE:FACTOR",
    callback=_happening(Slowed, float, int, float),
    help="From then on an engine, by its number from 1, has a factor of its speed.",
)
@_settings(Scene)
@_settings(Agents)
@click.pass_context
def replay(  # noqa: PLR0917 - click gives them
    context: click.Context,
    /,
    trace: str,
    policies: str,
    compare: tuple[str, ...],
    as_json: bool,
    out: Path | None,
    **given: Any,
) -> None:
    """Play a traffic on a fleet that exists only as numbers, and say what policies make of it.

    TRACE is a file in Mooncake's format, with blocks of 512 tokens, or "agent": agents that are made up, by
    the options from --sessions on. The same options give the same figures, to the last bit.
    """
    sys.path.append(str(Path.cwd()))  # where a policy named module:Class may lie
    try:
        drawing = artist() if out is not None else None
        cases = cases_of(trace, policies.split(","), _compared(context, compare), given)
        with click.progressbar(
            length=sum(len(case.traffic.asks) for case in cases), file=sys.stderr, update_min_steps=PROGRESS_STEPS
        ) as bar:
            results = [(case, played(case, lambda: bar.update(1))) for case in cases]
        if out is not None and drawing is not None:
            write(out, results, drawing)
    except (BadPolicy, BadTraffic, CannotReplay, NoPicture) as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(as_tree(results), indent=2) if as_json else "\n".join(table(results)))


def _compared(context: click.Context, compare: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each option that is compared."""
    options = {option.name: option for option in context.command.params if isinstance(option, click.Option)}
    settings = {field.name for kind in (Scene, Agents) for field in fields(kind) if "says" in field.metadata}
    compared: dict[str, list[Any]] = {}
    for text in compare:
        name, _, values = text.partition("=")
        key = name.strip("-").replace("-", "_")
        if key not in settings:
            known = ", ".join(sorted(settings)).replace("_", "-")
            raise click.BadParameter(f"{name!r} cannot be compared; these can: {known}", param_hint="--compare")
        compared[key] = [options[key].type.convert(value, options[key], context) for value in values.split(",")]
    return compared


def _load(path: Path) -> config.Config:
    try:
        return config.load(path)
    except config.ConfigError as error:
        raise click.ClickException(str(error)) from error


def _build(settings: config.Config, path: Path) -> House:
    """The house. A policy named module:Class may lie beside the configuration."""
    sys.path.append(str(path.resolve().parent))
    try:
        return build(settings)
    except (NoTokenizer, BadPolicy, BadAuthority, BadTemplate) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
