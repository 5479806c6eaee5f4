"""Every setting, one frozen tree. The only file that reads a file or the environment.

A YAML file holds the tree; any value in it can be set from outside as MOONGATE_SECTION__KEY, which
wins over the file. Unknown keys are errors that name the nearest known one.
"""

import os
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from connector.blocks import HASHING, hashing_of


class ConfigError(Exception):
    """The configuration cannot be used; the message has one line for each fault."""


def _origin(url: str) -> str:
    parts = urlsplit(url)
    plain = parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/")
    if not plain or parts.query or parts.fragment or parts.username is not None:
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT, with no path and no user")
    return url.rstrip("/")


def _from_environment(value: object) -> object:
    """`{env: NAME}` stands for the environment variable NAME."""
    if isinstance(value, dict) and value.keys() == {"env"}:
        name = str(value["env"])
        if not os.environ.get(name):
            raise ValueError(f"the environment variable {name} is not set")
        return os.environ[name]
    return value


def _no_user(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError("must be an http:// or https:// URL with no user in it")
    return url


def _release(version: str) -> str:
    if version != "auto" and hashing_of(version) is None:
        raise ValueError(f"must be auto or one of {', '.join(HASHING)}, in quotes")
    return version


def _usable(secret: SecretStr) -> SecretStr:
    value = secret.get_secret_value()
    if not value.strip() or not value.isprintable():
        raise ValueError("must not be empty, nor hold line breaks or control characters")
    return secret


Origin = Annotated[str, AfterValidator(_origin)]
Secret = Annotated[SecretStr, BeforeValidator(_from_environment), AfterValidator(_usable)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$")]


class Section(BaseModel):
    """A part of the tree: frozen, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        _refuse_unknown(cls, data)
        return data


def _refuse_unknown(section: type[BaseModel], data: object) -> None:
    if isinstance(data, section):
        return
    if not isinstance(data, dict):
        first = next(iter(section.model_fields))
        raise ValueError(f"must be a mapping, such as {{{first}: ...}}")  # noqa: TRY004 - pydantic's own language
    for key in data:
        if key not in section.model_fields:
            near = get_close_matches(str(key), section.model_fields, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(section.model_fields)}"
            raise ValueError(f"unknown key {key!r}; {hint}")


class CorsChoice(Section):
    origins: Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)] = []
    """Web pages that may call the gateway from a browser, such as https://app.example; `*` is every one."""


class Listen(Section):
    host: str = "127.0.0.1"
    """Address the gateway binds."""
    port: int = Field(8000, ge=0, le=65535)
    """Port the gateway binds."""
    max_body_bytes: int = Field(32 * 1024 * 1024, gt=0)
    """Largest request body, decoded; above it the answer is 413."""
    max_held_bytes: int = Field(512 * 1024 * 1024, gt=0)
    """Bytes of all request bodies that wait for an answer to begin; above it the answer is 503."""
    cors: CorsChoice = CorsChoice()


class Admin(Section):
    key: Secret | None = None
    """Bearer key of /metrics and /admin/explain. Without one, these answer loopback only."""


class Auth(Section):
    mode: Literal["keys", "none"] = "keys"
    """keys: a tenant's API key is needed. none: everybody is one tenant, `anonymous`."""


class Pool(Section):
    admin: list[Origin] = Field(min_length=1)
    """HTTP (metrics) ports of the pool's Mooncake masters."""
    deadline_ms: float = Field(5, gt=0)
    """How long a look-up may take before residency counts as unknown."""


class Keys(Section):
    prefix: str = "auto"
    """What stands before @tp_rank in the pool's keys. auto: the model folder's name on the engines."""
    tp: int = Field(1, ge=1)
    """--tensor-parallel-size of the engines."""
    pp: int = Field(1, ge=1)
    """--pipeline-parallel-size of the engines."""
    pcp: int = Field(1, ge=1)
    """--prefill-context-parallel-size of the engines."""
    dcp: int = Field(1, ge=1)
    """--decode-context-parallel-size of the engines."""
    kv_heads: int | None = Field(None, ge=1)
    """KV heads of the model, where there are fewer than tp; 1 with MLA."""
    store_tp: int | None = Field(None, ge=1)
    """store_tp_size of the engines' connector, or the least common multiple of its prefill_tp_sizes, if set."""
    layout: Literal["LBHNC", "LBNHC"] = "LBHNC"
    """The engines' KV cache layout; counts with store_tp only."""


class Chat(Section):
    """How the model's engines build a chat's prompt: as their flags say, which cannot be read from them."""

    template: Path | None = None
    """--chat-template of the engines, as a file here. None: the tokenizer folder's."""
    content_format: Literal["auto", "string", "openai"] = "auto"
    """--chat-template-content-format of the engines."""
    kwargs: dict[str, Any] = {}
    """--default-chat-template-kwargs of the engines."""
    trust_request_template: bool = False
    """--trust-request-chat-template of the engines. A client's template is then run here too."""
    exclude_tools_when_none: bool = False
    """--exclude-tools-when-tool-choice-none of the engines."""


class Render(Section):
    url: Origin
    """A server that renders: an engine with --enable-scale-out, or `vllm launch render`, which needs no GPU."""
    deadline_ms: float = Field(250, gt=0)
    """How long it may take; then the request is placed by load."""
    api_key: Secret | None = None
    """Sent to it as its bearer key."""


class Model(Section):
    name: Name
    """The name that clients use and engines serve."""
    aliases: list[Name] = []
    """Other names that clients may use; answers say the engines' own."""
    tokenizer: Path | None = None
    """Folder with tokenizer.json and the chat template. Without one, requests are placed by load."""
    chat: Chat = Chat()
    remembered_bytes: int = Field(256 * 1024 * 1024, ge=0)
    """Bytes of earlier prompts, their token ids and hashes, that are kept: what new ones share is not made again."""
    pool: str | None = None
    """The pool that this model's engines share."""
    hash: Literal["auto", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] = "auto"
    """--prefix-caching-hash-algo. auto: as the engines say."""
    hash_seed: str | None = Field(None, coerce_numbers_to_str=True)
    """PYTHONHASHSEED of the engines, if set. It cannot be read from them."""
    block_size: Literal["auto"] | Annotated[int, Field(gt=0)] = "auto"
    """--block-size. auto: as the engines say."""
    vllm: Annotated[str, AfterValidator(_release)] = Field("auto", coerce_numbers_to_str=True)
    """The vLLM release whose way of hashing the engines follow, such as 0.32. auto: as they say."""
    keys: Keys = Keys()
    render: Render | None = None
    """Who renders what cannot be rendered here: pictures, /v1/responses, /v1/messages, templates that are code."""
    send_tokens: Literal["never", "verified"] = "never"
    """verified: once ids have agreed often enough, engines get them and skip their own template and tokenizer."""


class KvEvents(Section):
    connect: str | None = Field(None, pattern=r"^tcp://.+:\d+$")
    """Where the engine publishes, such as tcp://10.0.0.7:5557; its own setting then has a `*` for the host."""
    replay: str | None = Field(None, pattern=r"^tcp://.+:\d+$")
    """Where it gives events again that were missed, its replay_endpoint. Without one, what was missed is forgotten."""
    bind: str | None = Field(None, pattern=r"^tcp://.+:\d+$")
    """Where this gateway listens, for an engine whose setting names a concrete address: vLLM connects then."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.connect is None) == (self.bind is None):
            raise ValueError("give connect or bind, one of them")
        return self


class Engine(Section):
    url: Origin
    """Where the engine listens."""
    model: str
    """Which of `models` it serves."""
    role: Literal["both", "prefill", "decode"] = "both"
    """What it may be used for."""
    api_key: Secret | None = None
    """Sent to the engine as its bearer key."""
    data_parallel: int = Field(1, ge=1, le=1024)
    """--data-parallel-size. Each rank has a cache of its own and is chosen by itself; kv_events are rank 0's."""
    kv_events: KvEvents | None = None
    """Its KV events. Without them, what it holds is estimated from what was sent there."""


class Engines(Section):
    static: list[Engine] = []
    """The engines, one by one."""
    ca: Path | None = None
    """Certificate authorities (PEM) that https:// engines are checked against. None: the system's."""
    poll_seconds: float = Field(1.0, gt=0)
    """How often each engine's health and load are read."""


class PolicyChoice(Section):
    use: str = "cost"
    """round_robin, least_loaded, session, cache_aware, cost, disaggregated, an installed policy, or module:Class."""
    settings: dict[str, Any] = {}
    """What the policy's constructor takes."""
    session_header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")] = "x-session-id"
    """Names a client's session, for policies that keep one together."""


class Timeouts(Section):
    body: float = Field(60, gt=0)
    """Seconds for a client to send its request body."""
    connect: float = Field(5, gt=0)
    """Seconds for a connection to an engine."""
    head: float = Field(600, gt=0)
    """Seconds until the first byte of an answer's body; a long prefill takes minutes."""
    idle: float = Field(60, gt=0)
    """Seconds between two pieces of an answer."""
    write: float = Field(60, gt=0)
    """Seconds for which a client may take nothing of its answer; then it is dropped."""
    keep_alive: float = Field(75, gt=0)
    """Seconds for which a client's connection may lie idle; more than the load balancer's before it."""
    total: float = Field(3600, gt=0)
    """Seconds for a whole request."""
    handoff: float = Field(10, gt=0)
    """Seconds for a prefilled prompt's last block to appear in the pool."""


class Retries(Section):
    attempts: int = Field(2, ge=1, le=10)
    """Engines that are tried for a request before its first byte."""
    budget: float = Field(0.1, ge=0, le=1)
    """Share of all requests that may be tried again, so that an outage makes no storm."""
    local_prefill: bool = False
    """After failed prefill legs: true lets the decode engine compute the prompt, false is an error."""


class SelfCheck(Section):
    audit_every: int = Field(200, ge=0)
    """One of so many requests is audited: the engine that answered is asked for the prompt's ids. 0: none."""
    calibrate: bool = True
    """Send engines that come in some short prompts, to see whether ids, hashes and the pool's keys agree."""


class TenantKey(Section):
    sha256: Annotated[SecretStr, Field(min_length=64, max_length=64)]
    """SHA-256 of the key in hex: printf %s KEY | sha256sum."""


class Tenant(Section):
    name: Name
    """Stands in metrics and traces."""
    keys: list[TenantKey] = Field(min_length=1)
    """API keys, hashed."""
    share: Name | None = None
    """Tenants with the same `share` share one cache domain. None: its own."""
    models: list[str] | None = None
    """The models that it may ask for. None: all."""
    salt_epoch: int = 0
    """Another number is another salt: everything cached for the tenant is left behind."""
    requests_per_minute: int | None = Field(None, gt=0)
    """None: no limit."""
    tokens_per_minute: int | None = Field(None, gt=0)
    """Prompt and completion tokens. None: no limit."""
    concurrent: int | None = Field(None, gt=0)
    """Requests under way at once. None: no limit."""


class Telemetry(Section):
    otlp: Annotated[str, AfterValidator(_no_user)] | None = None
    """OTLP/HTTP endpoint for traces, such as http://127.0.0.1:4318/v1/traces."""
    sample: float = Field(1.0, ge=0, le=1)
    """Share of requests traced, where the client's traceparent does not say."""
    expose_routing: bool = False
    """Add x-moongate-route to answers: engine (and prefill engine), reason, predicted own and pool tokens."""
    access_log: bool = False
    """One line of JSON for each request, on standard error."""


class Config(BaseSettings):
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="MOONGATE_",
        env_nested_delimiter="__",
        use_attribute_docstrings=True,
    )

    listen: Listen = Listen()
    admin: Admin = Admin()
    auth: Auth = Auth()
    secret: Secret | None = None
    """Key of the HMAC that makes the tenants' salts. Needed with auth mode keys."""
    pools: dict[str, Pool] = {}
    models: list[Model] = Field(min_length=1)
    engines: Engines = Engines()
    policy: PolicyChoice = PolicyChoice()
    timeouts: Timeouts = Timeouts()
    retries: Retries = Retries()
    self_check: SelfCheck = SelfCheck()
    tenants: list[Tenant] = []
    telemetry: Telemetry = Telemetry()

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        _refuse_unknown(cls, data)
        return data

    @model_validator(mode="after")
    def _references(self) -> Self:
        models = [model.name for model in self.models]
        _distinct("models", [*models, *(alias for model in self.models for alias in model.aliases)])
        _distinct("tenants", [tenant.name for tenant in self.tenants])
        _distinct("engines.static", [urlsplit(engine.url).netloc for engine in self.engines.static])
        _known("tenants", "model", models, [(t.name, name) for t in self.tenants for name in t.models or ()])
        _known("models", "pool", self.pools, [(m.name, m.pool) for m in self.models if m.pool is not None])
        _known("engines.static", "model", models, [(e.url, e.model) for e in self.engines.static])
        if self.auth.mode == "keys" and (not self.tenants or self.secret is None):
            raise ValueError("auth mode keys needs a secret and at least one tenant (or set auth: {mode: none})")
        digests = [key.sha256.get_secret_value().lower() for tenant in self.tenants for key in tenant.keys]
        if any(digest.strip("0123456789abcdef") for digest in digests):
            raise ValueError("tenants: a key's sha256 must be 64 hexadecimal digits")
        if len(set(digests)) < len(digests):
            raise ValueError("tenants: two tenants have the same key")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment over the file, and nothing else."""
        return env_settings, init_settings


def _known(section: str, kind: str, known: Collection[str], named: Sequence[tuple[str, str]]) -> None:
    for who, name in named:
        if name not in known:
            raise ValueError(f"{section}: {who} names the {kind} {name!r}, which is not under {kind}s")


def _distinct(where: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{where}: {name!r} stands there twice")


def load(path: Path) -> Config:
    """Read and check a configuration. Raises `ConfigError`."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 - a SafeLoader
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {_place(error)}") from None
    _check_environment()
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold a mapping of sections, such as 'models:' and 'engines:'")
    try:
        return Config(**{str(key): value for key, value in tree.items()})
    except SettingsError as error:
        raise ConfigError(f"environment: {error}; a section or list in a variable must be JSON") from None
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {_line(dict(fault))}" for fault in error.errors())) from error


class _Loader(yaml.SafeLoader):
    """YAML in which a key stands once: the second of two would win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _check_environment() -> None:
    """Refuse a variable that looks like a setting of a section that there is not."""
    for name in os.environ:
        section, mark, _ = name.removeprefix("MOONGATE_").partition("__")
        if name.startswith("MOONGATE_") and mark and section.lower() not in Config.model_fields:
            near = get_close_matches(section.lower(), Config.model_fields, 1)
            hint = f"did you mean MOONGATE_{near[0].upper()}__?" if near else "there is no such section"
            raise ConfigError(f"environment: {name} sets nothing; {hint}")


def _place(error: yaml.YAMLError) -> str:
    """What is wrong and where, without the line itself: it may hold a secret."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return "a character that YAML does not know"


def _line(fault: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    message = str(fault["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def masked(config: Config) -> dict[str, Any]:
    """The effective tree with every secret masked, for people to read."""
    return config.model_dump(mode="json")
