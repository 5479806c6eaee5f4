import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, SecretStr, ValidationError

from gateway import config
from gateway.config import Config, ConfigError, load, masked

DIGEST = "ab" * 32
OTHER = "cd" * 32
MINIMAL: dict[str, Any] = {"models": [{"name": "tiny"}], "auth": {"mode": "none"}}
FULL: dict[str, Any] = {
    "listen": {
        "host": "0.0.0.0",
        "port": 9000,
        "max_body_bytes": 1000,
        "max_held_bytes": 5000,
        "cors": {"origins": ["https://app.example"]},
    },
    "admin": {"key": "canary-admin"},
    "auth": {"mode": "keys"},
    "secret": "canary-secret",
    "pools": {"main": {"admin": ["http://127.0.0.1:9003"], "deadline_ms": 7}},
    "models": [
        {
            "name": "tiny",
            "aliases": ["small"],
            "tokenizer": "/models/tiny",
            "chat": {
                "template": "/models/tiny.jinja",
                "content_format": "openai",
                "kwargs": {"enable_thinking": False},
                "trust_request_template": True,
                "exclude_tools_when_none": True,
            },
            "remembered_bytes": 1000,
            "pool": "main",
            "hash": "sha256",
            "hash_seed": 0,
            "send_tokens": "verified",
            "render": {"url": "http://127.0.0.1:8200", "deadline_ms": 100, "api_key": "r"},
            "block_size": 32,
            "vllm": "0.32",
            "keys": {
                "prefix": "p",
                "tp": 2,
                "pp": 2,
                "pcp": 2,
                "dcp": 2,
                "kv_heads": 1,
                "store_tp": 4,
                "layout": "LBNHC",
            },
        }
    ],
    "engines": {
        "static": [
            {
                "url": "http://10.0.0.1:8000",
                "model": "tiny",
                "role": "decode",
                "api_key": "canary-engine",
                "data_parallel": 2,
                "kv_events": {"connect": "tcp://10.0.0.7:5557", "replay": "tcp://10.0.0.7:5657"},
            }
        ],
        "ca": "/etc/engines.pem",
        "poll_seconds": 2,
    },
    "policy": {"use": "least_loaded", "settings": {"request_tokens": 5}, "session_header": "x-chat"},
    "timeouts": {"body": 1, "connect": 2, "head": 3, "idle": 4, "write": 9, "keep_alive": 7, "total": 5, "handoff": 6},
    "retries": {"attempts": 3, "budget": 0.5, "local_prefill": True},
    "self_check": {"audit_every": 50, "calibrate": False},
    "tenants": [
        {
            "name": "team-a",
            "keys": [{"sha256": DIGEST}],
            "share": "group",
            "models": ["tiny"],
            "salt_epoch": 3,
            "requests_per_minute": 1,
            "tokens_per_minute": 2,
            "concurrent": 3,
        }
    ],
    "telemetry": {"otlp": "http://127.0.0.1:4318/v1/traces", "sample": 0.5, "expose_routing": True, "access_log": True},
}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("MOONGATE_"):
            monkeypatch.delenv(name)


def written(folder: Path, tree: object) -> Path:
    path = folder / "moongate.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree), encoding="utf-8")
    return path


def fault(folder: Path, tree: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(written(folder, tree))
    return str(caught.value)


def sections(tree: object, where: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Every mapping in the full tree whose keys are settings."""
    if isinstance(tree, dict):
        if where not in {("pools",), ("policy", "settings"), ("models", 0, "chat", "kwargs")}:
            yield where
        for key, value in tree.items():
            yield from sections(value, (*where, key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from sections(value, (*where, number))


def at(tree: Any, where: tuple[object, ...]) -> Any:
    for part in where:
        tree = tree[part]
    return tree


def models(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield kind
    for sub in kind.__subclasses__():
        yield from models(sub)


def test_a_full_tree_loads_with_every_value(tmp_path: Path) -> None:
    got = masked(load(written(tmp_path, FULL)))
    for where in sections(FULL):
        for key, value in at(FULL, where).items():
            seen = at(got, (*where, key))
            if not isinstance(value, dict | list):
                assert seen in (value, "**********") or str(value) == seen, (where, key)


def test_the_full_tree_names_every_setting() -> None:
    given = {frozenset(at(FULL, where)) for where in sections(FULL)}
    own: list[type[BaseModel]] = [Config, *(section for section in models(config.Section) if section.model_fields)]
    for section in own:
        if section is not config.KvEvents:  # one of its two settings is given, never both
            assert frozenset(section.model_fields) in given, section


@pytest.mark.parametrize("events", [{}, {"connect": "tcp://a:1", "bind": "tcp://b:2"}])
def test_events_come_from_one_side(tmp_path: Path, events: dict[str, str]) -> None:
    tree = yaml.safe_load(yaml.safe_dump(FULL))
    tree["engines"]["static"][0]["kv_events"] = events
    assert "give connect or bind, one of them" in fault(tmp_path, tree)


def test_little_is_needed(tmp_path: Path) -> None:
    got = load(written(tmp_path, MINIMAL))
    assert got.listen.port == 8000
    assert got.policy.use == "cost"


@pytest.mark.parametrize("where", list(sections(FULL)), ids=str)
def test_an_unknown_key_names_the_nearest(tmp_path: Path, where: tuple[object, ...]) -> None:
    tree = yaml.safe_load(yaml.safe_dump(FULL))
    section = at(tree, where)
    known = next(iter(section))
    section[known[:-1] + "zz" if len(known) > 3 else known + "z"] = 1
    message = fault(tmp_path, tree)
    assert f"did you mean {known!r}?" in message
    assert message.count("\n") == 0


def test_a_strange_key_lists_those_that_there_are(tmp_path: Path) -> None:
    assert "known: prefix, tp, pp" in fault(tmp_path, MINIMAL | {"models": [{"name": "m", "keys": {"qqqqq": 1}}]})


def test_the_environment_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONGATE_LISTEN__PORT", "9999")
    monkeypatch.setenv("MOONGATE_SECRET", "from outside")
    monkeypatch.setenv("MOONGATE_TIMEOUTS__HEAD", "1.5")
    monkeypatch.setenv("MOONGATE_RETRIES__LOCAL_PREFILL", "false")
    monkeypatch.setenv("MOONGATE_ADMIN__KEY", "admin from outside")
    got = load(written(tmp_path, FULL))
    assert (got.listen.port, got.listen.host) == (9999, "0.0.0.0")
    assert got.secret == SecretStr("from outside")
    assert got.admin.key == SecretStr("admin from outside")
    assert (got.timeouts.head, got.timeouts.idle) == (1.5, 4)
    assert got.retries.local_prefill is False


def test_a_list_from_the_environment_is_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONGATE_ENGINES__STATIC", '[{"url": "http://10.0.0.9:1", "model": "tiny"}]')
    assert [e.url for e in load(written(tmp_path, FULL)).engines.static] == ["http://10.0.0.9:1"]


@pytest.mark.parametrize("name", ["MOONGATE_LISTEN", "MOONGATE_ENGINES__STATIC", "MOONGATE_TENANTS"])
def test_an_environment_that_is_not_json_is_a_clear_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "{canary")
    message = fault(tmp_path, MINIMAL)
    assert name.removeprefix("MOONGATE_").partition("__")[0].lower() in message
    assert "JSON" in message
    assert "canary" not in message


def test_an_unknown_key_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONGATE_LISTEN__PROT", "1")
    assert "did you mean 'port'?" in fault(tmp_path, MINIMAL)


def test_a_bad_value_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONGATE_LISTEN__PORT", "99999")
    assert "listen.port" in fault(tmp_path, MINIMAL)


def test_secrets_from_named_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_SECRET", "s1")
    monkeypatch.setenv("THE_ENGINE_KEY", "s2")
    engine = FULL["engines"]["static"][0] | {"api_key": {"env": "THE_ENGINE_KEY"}}
    got = load(written(tmp_path, FULL | {"secret": {"env": "THE_SECRET"}, "engines": {"static": [engine]}}))
    assert got.secret == SecretStr("s1")
    assert got.engines.static[0].api_key == SecretStr("s2")


@pytest.mark.parametrize("value", [None, ""])
def test_a_named_variable_must_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is not None:
        monkeypatch.setenv("THE_SECRET", value)
    assert "secret: the environment variable THE_SECRET is not set" in fault(
        tmp_path, FULL | {"secret": {"env": "THE_SECRET"}}
    )


def test_masked_shows_no_secret_and_no_digest(tmp_path: Path) -> None:
    got = load(written(tmp_path, FULL))
    for text in (str(masked(got)), repr(got), str(got)):
        assert "canary" not in text
        assert DIGEST not in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": []}, "models"),
        ({"models": [{"name": "tiny"}, {"name": "tiny"}]}, "'tiny' stands there twice"),
        ({"models": [{"name": "tiny", "pool": "mian"}]}, "names the pool 'mian', which is not under pools"),
        ({"models": [{"name": "tiny", "aliases": ["tiny"]}]}, "'tiny' stands there twice"),
        ({"models": [{"name": "tiny", "aliases": ["x"]}, {"name": "big", "aliases": ["x"]}]}, "'x' stands there twice"),
        ({"models": [{"name": "other"}], "tenants": []}, "names the model 'tiny', which is not under models"),
        ({"models": [{"name": "other"}]}, "team-a names the model 'tiny', which is not under models"),
        ({"secret": None}, "needs a secret and at least one tenant"),
        ({"tenants": []}, "needs a secret and at least one tenant"),
        (
            {"engines": {"static": [{"url": "http://a:1", "model": "tiny"}, {"url": "http://a:1/", "model": "tiny"}]}},
            "'a:1' stands there twice",
        ),
        (
            {"tenants": [{"name": "a", "keys": [{"sha256": DIGEST}]}, {"name": "a", "keys": [{"sha256": OTHER}]}]},
            "'a' stands there twice",
        ),
        (
            {
                "tenants": [
                    {"name": "a", "keys": [{"sha256": DIGEST}]},
                    {"name": "b", "keys": [{"sha256": DIGEST.upper()}]},
                ]
            },
            "two tenants have the same key",
        ),
        ({"tenants": [{"name": "a", "keys": [{"sha256": "zz" * 32}]}]}, "64 hexadecimal digits"),
        ({"tenants": [{"name": "a", "keys": [{"sha256": "ab"}]}]}, "tenants.0.keys.0.sha256"),
        ({"tenants": [{"name": "a", "keys": []}]}, "tenants.0.keys"),
        ({"tenants": [{"name": "a\nb", "keys": [{"sha256": DIGEST}]}]}, "tenants.0.name"),
        ({"listen": {"port": -1}}, "listen.port"),
        ({"listen": 5}, "listen"),
        ({"auth": {"mode": "off"}}, "auth.mode"),
        ({"pools": {"main": {"admin": []}}}, "pools.main.admin"),
        ({"timeouts": {"head": 0}}, "timeouts.head"),
        ({"retries": {"attempts": 0}}, "retries.attempts"),
        ({"retries": {"budget": 1.5}}, "retries.budget"),
        ({"listen": {"max_held_bytes": 0}}, "listen.max_held_bytes"),
        ({"telemetry": {"sample": 2}}, "telemetry.sample"),
    ],
)
def test_what_does_not_fit_together(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    message = fault(tmp_path, FULL | changes)
    assert words in message
    assert str(tmp_path) in message
    assert DIGEST not in message
    assert "canary" not in message


@pytest.mark.parametrize(
    "url",
    [
        "10.0.0.1:8000", "ftp://a:1", "file:///etc/passwd", "http://", "http://a:1/v1", "http://u:canary@a:1",
        "http://a:1?x=canary", "http://a:1#x",
    ],
)  # fmt: skip
def test_engine_urls_are_origins(tmp_path: Path, url: str) -> None:
    message = fault(tmp_path, FULL | {"engines": {"static": [{"url": url, "model": "tiny"}]}})
    assert "engines.static.0.url: must be http://HOST:PORT" in message
    assert "canary" not in message


def test_every_fault_is_told_on_a_line_of_its_own(tmp_path: Path) -> None:
    message = fault(tmp_path, FULL | {"listen": {"port": -1}, "timeouts": {"head": 0, "idle": 0}})
    assert len(message.splitlines()) == 3
    assert all(line.startswith(str(tmp_path)) for line in message.splitlines())


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.yaml")


def test_a_folder_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "x")


@pytest.mark.parametrize("text", ['secret: "canary', "secret: canary: x", "a: [", "\x01canary", "- a\nb: canary"])
def test_what_is_not_yaml_is_told_without_the_line(tmp_path: Path, text: str) -> None:
    message = fault(tmp_path, text)
    assert "not YAML" in message
    assert "canary" not in message


@pytest.mark.parametrize("text", ["", "# nothing\n", "- models\n", "text", "5"])
def test_what_is_no_mapping(tmp_path: Path, text: str) -> None:
    assert "must hold a mapping of sections" in fault(tmp_path, text)


def test_keys_of_another_kind(tmp_path: Path) -> None:
    assert "unknown key '1'" in fault(tmp_path, "1: 2\nmodels: [{name: m}]")


def test_nothing_can_be_set_afterwards(tmp_path: Path) -> None:
    got = load(written(tmp_path, FULL))
    for section in (got, got.listen, got.models[0], got.models[0].keys, got.tenants[0], got.engines.static[0]):
        name = next(iter(type(section).model_fields))
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, 1)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("models: [{name: tiny}]\nauth: {mode: none}\nlisten: {port: 1}\nlisten: {port: 2}\n")
    with pytest.raises(config.ConfigError, match="line 4, column 1: the key 'listen' stands twice"):
        load(path)


def test_merged_keys_are_no_doubles(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text("models: [&a {name: tiny, block_size: 16}, {<<: *a, name: big}]\nauth: {mode: none}\n")
    assert [(m.name, m.block_size) for m in load(path).models] == [("tiny", 16), ("big", 16)]


def test_a_variable_of_no_section_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONGATE_LISTN__PORT", "1")
    with pytest.raises(
        config.ConfigError, match=r"MOONGATE_LISTN__PORT sets nothing; did you mean MOONGATE_LISTEN__\?"
    ):
        load(written(tmp_path, MINIMAL))


@pytest.mark.parametrize(
    ("change", "said"),
    [({"auth": "none"}, "auth: must be a mapping, such as {mode: ...}"), ({"listen": 8000}, "such as {host: ...}")],
)
def test_what_must_be_a_mapping_is_told_so(tmp_path: Path, change: dict[str, object], said: str) -> None:
    assert said in fault(tmp_path, MINIMAL | change)


@pytest.mark.parametrize("value", ["", "  ", "a\nb"])
@pytest.mark.parametrize("where", ["secret", "admin", "api_key"])
def test_a_secret_that_is_none_is_refused(tmp_path: Path, where: str, value: str) -> None:
    tree = yaml.safe_load(yaml.safe_dump(FULL))
    if where == "admin":
        tree["admin"]["key"] = value
    elif where == "api_key":
        tree["engines"]["static"][0]["api_key"] = value
    else:
        tree["secret"] = value
    said = fault(tmp_path, tree)
    assert "must not be empty" in said
    assert repr(value) not in said


@pytest.mark.parametrize("url", ["http://user:canary@collector:4318", "collector:4318", "http://", "file:///x"])
def test_where_traces_go_is_a_url_without_a_user(tmp_path: Path, url: str) -> None:
    said = fault(tmp_path, MINIMAL | {"telemetry": {"otlp": url}})
    assert "telemetry.otlp: must be an http" in said
    assert "canary" not in said


@pytest.mark.parametrize("release", ["0.30", "0.32", "0.32.1"])
def test_a_release_is_given_by_its_number(tmp_path: Path, release: str) -> None:
    tree = MINIMAL | {"models": [{"name": "m", "vllm": release}]}
    assert load(written(tmp_path, tree)).models[0].vllm == release


@pytest.mark.parametrize("release", ["0.27", "0.99", 0.3, "main", ""])
def test_a_release_that_is_not_known_is_refused(tmp_path: Path, release: object) -> None:
    said = fault(tmp_path, MINIMAL | {"models": [{"name": "m", "vllm": release}]})
    assert "models.0.vllm: must be auto or one of 0.28, " in said
