"""Puts the house together: from a configuration to an application, opened and closed in order."""

import logging
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import cast

from fastapi import FastAPI
from jinja2 import TemplateError

from connector.blocks import Algorithm, hashing_of
from connector.keys import Ranks
from connector.mooncake import Master
from connector.prompts import Prompts
from connector.remote import RemoteRender
from connector.render import Rules
from connector.residency import Residence
from connector.templates import chat_template
from connector.tokens import Tokenizer
from connector.wire import Timeouts
from gateway import config
from gateway.agreement import Agreement
from gateway.api import Surface, surface
from gateway.audit import Auditor
from gateway.cors import Cors
from gateway.explain import Explain
from gateway.fleet import EngineSpec, EventSource, Fleet
from gateway.front import Front
from gateway.limits import Limits
from gateway.models import Model, Pool
from gateway.placing import Placing
from gateway.relay import Relay
from gateway.serve import Bounds, Serve
from gateway.settle import Settle
from gateway.tenants import Tenant, Tenants
from gateway.trace import Telemetry
from policies.guard import Guarded
from policies.least_loaded import LeastLoaded
from policies.load import load as load_policy

log = logging.getLogger("moongate")


class BadAuthority(Exception):
    """The certificates that engines are checked against cannot be read; the message says which file."""


class BadTemplate(Exception):
    """A file that a model's chat template is in cannot be read, or holds none; the message says which."""


@dataclass(frozen=True, slots=True)
class House:
    """The application, and the protocol that its connections speak."""

    surface: Surface
    front: type[Front]
    """uvicorn asks for a class and calls it; what is given is a partial one."""


def build(settings: config.Config) -> House:
    """The house. Raises `NoTokenizer`, `BadPolicy`, `BadAuthority` or `BadTemplate` for what is named and not there."""
    telemetry = Telemetry(otlp=settings.telemetry.otlp, sample=settings.telemetry.sample)
    tenants = _tenants(settings)
    tls = authorities(settings.engines.ca)
    fleet = _fleet(settings, tls)
    pools = {
        name: Pool(name, Residence(Master(pool.admin), pool.deadline_ms / 1000))
        for name, pool in settings.pools.items()
    }
    models = {model.name: model_of(model, pools, tls) for model in settings.models}
    cors = Cors(settings.listen.cors.origins)
    limits = Limits(time.monotonic)
    agreements = {name: Agreement(name, telemetry.checks, every=settings.self_check.audit_every) for name in models}
    fallback = LeastLoaded()
    policy = Guarded(
        load_policy(settings.policy.use, settings.policy.settings),
        fallback,
        clock=time.perf_counter,
        count=telemetry.policy_failures.inc,
    )
    auditor = Auditor(
        fleet=fleet,
        models=models,
        agreements=agreements,
        checks=telemetry.checks,
        calibrates=settings.self_check.calibrate,
    )
    decides = partial(
        Placing,
        tenants=tenants,
        models={name: models[model.name] for model in settings.models for name in (model.name, *model.aliases)},
        agreements=agreements,
        auditor=auditor,
        fleet=fleet,
        policy=policy,
    )
    placing = decides(telemetry=telemetry)
    explain = Explain(
        tenants=tenants,
        placing=decides(telemetry=Telemetry()),
        fleet=fleet,
        policy=policy,
        fallback=fallback,
        name=settings.policy.use,
        settings=settings.policy.settings,
    )
    serve = Serve(
        tenants=tenants,
        limits=limits,
        placing=placing,
        agreements=agreements,
        fleet=fleet,
        relay=Relay(fleet, telemetry, budget=settings.retries.budget, total=settings.timeouts.total),
        settle=Settle(
            limits=limits,
            policy=policy,
            agreements=agreements,
            auditor=auditor,
            telemetry=telemetry,
            access_log=settings.telemetry.access_log,
        ),
        telemetry=telemetry,
        bounds=Bounds(
            body_bytes=settings.listen.max_body_bytes,
            held_bytes=settings.listen.max_held_bytes,
            body=settings.timeouts.body,
            handoff=settings.timeouts.handoff,
            attempts=settings.retries.attempts,
            local_prefill=settings.retries.local_prefill,
        ),
        session_header=settings.policy.session_header,
        expose_routing=settings.telemetry.expose_routing,
    )

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        if settings.auth.mode == "none":
            log.warning("AUTH IS OFF: everybody who reaches this port is the tenant 'anonymous'")
        for pool in pools.values():
            await pool.residence.open()
        await fleet.open()
        auditor.open()
        try:
            yield
        finally:
            await auditor.close()
            await fleet.close()
            for pool in pools.values():
                await pool.residence.close()
            for model in models.values():
                model.close()
            telemetry.close()

    application = surface(
        cors=cors,
        tenants=tenants,
        fleet=fleet,
        models=models,
        agreements=agreements,
        telemetry=telemetry,
        explain=explain,
        admin_key=settings.admin.key.get_secret_value() if settings.admin.key is not None else None,
        body_bytes=settings.listen.max_body_bytes,
        body_seconds=settings.timeouts.body,
        lifespan=life,
    )
    front = partial(
        Front,
        route=serve.route,
        refused=telemetry.refused.inc,
        cors=cors,
        write=settings.timeouts.write,
        keep_alive=settings.timeouts.keep_alive,
    )
    return House(application, cast("type[Front]", front))


def _tenants(settings: config.Config) -> Tenants:
    secret = settings.secret.get_secret_value() if settings.secret is not None else None
    if settings.auth.mode == "none":
        return Tenants(None, secret)
    by_digest = {
        key.sha256.get_secret_value().lower(): Tenant(
            name=tenant.name,
            share=tenant.share,
            salt_epoch=tenant.salt_epoch,
            models=frozenset(tenant.models) if tenant.models is not None else None,
            requests_per_minute=tenant.requests_per_minute,
            tokens_per_minute=tenant.tokens_per_minute,
            concurrent=tenant.concurrent,
        )
        for tenant in settings.tenants
        for key in tenant.keys
    }
    return Tenants(by_digest, secret)


def _fleet(settings: config.Config, tls: ssl.SSLContext | None) -> Fleet:
    specs = [
        EngineSpec(
            url=engine.url,
            model=engine.model,
            role=engine.role,
            api_key=engine.api_key.get_secret_value() if engine.api_key is not None else None,
            events=_events(engine.kv_events, rank),
            rank=rank if engine.data_parallel > 1 else None,
        )
        for engine in settings.engines.static
        for rank in range(engine.data_parallel)
    ]
    limits = settings.timeouts
    return Fleet(
        specs,
        timeouts=Timeouts(
            connect=limits.connect, head=limits.head, idle=limits.idle, reader=limits.write, total=limits.total
        ),
        poll=settings.engines.poll_seconds,
        clock=time.monotonic,
        tls=tls,
    )


def authorities(path: Path | None) -> ssl.SSLContext | None:
    if path is None:
        return None
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise BadAuthority(f"engines.ca: {path} holds no certificates in PEM form") from error


def _events(settings: config.KvEvents | None, rank: int) -> EventSource | None:
    """Where one data parallel rank's events come from: vLLM adds the rank to the port."""
    if settings is None:
        return None
    return EventSource(
        _port_of(settings.connect or settings.bind or "", rank),
        bind=settings.bind is not None,
        replay=_port_of(settings.replay, rank) if settings.replay is not None else None,
    )


def _port_of(address: str, rank: int) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}"


def _rules(chat: config.Chat) -> Rules:
    return Rules(
        template=_template(chat.template) if chat.template is not None else None,
        content_format=chat.content_format,
        kwargs=MappingProxyType(chat.kwargs),
        trust_request_template=chat.trust_request_template,
        exclude_tools_when_none=chat.exclude_tools_when_none,
    )


def _template(path: Path) -> str:
    try:
        source = path.read_text(encoding="utf-8")
        chat_template(source)
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        raise BadTemplate(f"models[].chat.template: {path} holds no chat template: {error}") from error
    return source


def _render(settings: config.Render | None, tls: ssl.SSLContext | None) -> RemoteRender | None:
    if settings is None:
        return None
    key = settings.api_key.get_secret_value() if settings.api_key is not None else None
    return RemoteRender(settings.url, settings.deadline_ms / 1000, key, tls)


def model_of(model: config.Model, pools: dict[str, Pool], tls: ssl.SSLContext | None) -> Model:
    keys = model.keys
    tokenizer = Tokenizer(model.tokenizer, _rules(model.chat)) if model.tokenizer is not None else None
    return Model(
        name=model.name,
        prompts=Prompts(tokenizer, max_bytes=model.remembered_bytes) if tokenizer is not None else None,
        pool=pools[model.pool] if model.pool is not None else None,
        algorithm=None if model.hash == "auto" else Algorithm(model.hash),
        block_size=None if model.block_size == "auto" else model.block_size,
        seed=model.hash_seed,
        hashing=None if model.vllm == "auto" else hashing_of(model.vllm),
        render=_render(model.render, tls),
        sends_tokens=model.send_tokens == "verified",
        key_prefix=None if keys.prefix == "auto" else keys.prefix,
        ranks=Ranks(
            tp=keys.tp,
            pp=keys.pp,
            pcp=keys.pcp,
            dcp=keys.dcp,
            kv_heads=keys.kv_heads,
            store_tp=keys.store_tp,
            layout=keys.layout,
        ),
    )
