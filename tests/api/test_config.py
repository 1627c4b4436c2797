from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from firepool_broker import config
from firepool_broker.config import BrokerConfig, ConfigError, PoolConfig, load
from firepool_broker.core.policy import PoolPolicy, Shape
from firepool_broker.docstrings import field_texts
from msgspec import Struct


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "broker.yaml"


def test_the_defaults_are_the_embedded_ones() -> None:
    loaded = load(None)
    policies = loaded.policies(cores=16.0, memory_gib=64.0, gpus={"H200": 2})
    small, everything, gpu = policies.pools
    assert policies.default == "cpu-small"
    assert (small.shape.cpu, small.shape.memory_gib, small.min_count) == (2.0, 4.0, 1)
    assert (everything.name, everything.shape.cpu, everything.min_count) == ("cpu", 16.0, 0)
    assert (gpu.name, gpu.max_count) == ("gpu", 2)
    for pool in (small, everything):
        assert (pool.max_idle_count, pool.max_count) == (2, 8)
        assert (pool.idle_timeout_seconds, pool.hold_seconds) == (600.0, 600.0)
    assert loaded.idle_exit_seconds.or_none == 600.0
    assert loaded.output.limit_mib == 64
    assert loaded.output.retention_seconds == 7 * 86400.0
    assert loaded.limits.job_timeout_seconds.or_none is None
    assert policies.session_ttl_seconds == 30.0


def test_the_only_pool_is_the_default() -> None:
    one = config.BrokerConfig(pools={"mine": config.PoolConfig()})
    assert one.policies(2, 4, {}).default == "mine"
    two = config.BrokerConfig(pools={"a": config.PoolConfig(), "b": config.PoolConfig()})
    assert two.policies(2, 4, {}).default is None


def test_a_pool_has_every_knob_of_the_policy_with_its_default() -> None:
    knobs = {field.name for field in fields(PoolPolicy)} - {"name"}
    assert set(PoolConfig.__struct_fields__) == knobs | {"preload"}
    assert PoolConfig().policy("p") == PoolPolicy("p", Shape())


def test_every_setting_has_a_text() -> None:
    for kind in vars(config).values():
        if isinstance(kind, type) and issubclass(kind, Struct) and kind is not Struct:
            assert set(field_texts(kind)) == set(kind.__struct_fields__), kind


def test_a_whole_file(file: Path) -> None:
    file.write_text(
        """
        idle_exit_seconds: off
        default_pool: big
        isolation: process
        pools:
          big:
            shape: {cpu: 8, memory_gib: 32}
            max_count: 3
            caller_hold_seconds: 1h 30m
            max_jobs_per_pod: 50
            max_pod_lifetime_seconds: off
            preload: [numpy]
        limits: {max_pods_per_caller: 2, terminate_grace_seconds: 500ms}
        output: {retention_seconds: 1d}
        """
    )
    loaded = load(file)
    policies = loaded.policies(2.0, 4.0)
    (pool,) = policies.pools
    assert (pool.name, pool.max_count, pool.caller_hold_seconds) == ("big", 3, 5400.0)
    assert (pool.max_jobs_per_pod, pool.max_pod_lifetime_seconds) == (50, None)
    assert (policies.default, policies.max_pods_per_caller) == ("big", 2)
    assert policies.terminate_grace_seconds == 0.5
    assert loaded.idle_exit_seconds.or_none is None
    assert loaded.output.retention_seconds == 86400.0
    assert loaded.preload("big") == ("numpy",)
    assert loaded.preload("other") == ()


def test_an_empty_file_is_the_defaults(file: Path) -> None:
    file.write_text("# nothing\n")
    assert load(file) == BrokerConfig()


def test_the_environment_stands_above_the_file(file: Path) -> None:
    file.write_text("isolation: auto")
    assert load(file, {"FIREPOOL_ISOLATION": "none"}).isolation == "none"
    with pytest.raises(ConfigError, match="did you mean 'process'"):
        load(None, {"FIREPOOL_ISOLATION": "proces"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("poools: {}", "unknown setting 'poools'; did you mean 'pools'"),
        ("pools: {a: {max_cuont: 3}}", "'max_cuont'; did you mean 'max_count'"),
        ("pools: {a: {shape: {cpus: 1}}}", "'cpus'; did you mean 'cpu'"),
        ("pools: {a: {max_count: three}}", "expected `int`"),
        ("pools: {a: {tag_policy: retier}}", "did you mean 'retire'"),
        ("pools: {a: {min_count: 9}}", "min_count: floor 9 is above max_count 8"),
        ("pools: {a: {max_jobs_per_pod: 0}}", "max_jobs_per_pod"),
        ("pools: {a: {max_jobs_per_pod: -1}}", "say off"),
        ("pools: {a: {max_pod_lifetime_seconds: 1}}", "pod_start_seconds"),
        ("pools: {a: {idle_timeout_seconds: off}}", "'off' is no duration"),
        ("default_pool: gpu", "default"),
        ("idle_exit_seconds: 10 parsecs", "is no duration"),
        ("idle_exit_seconds: -1", "is no duration"),
        ("idle_exit_seconds: .inf", "is no duration"),
        ("idle_exit_seconds: true", "is no duration"),
        ("idle_exit_seconds: 0", "must be above 0"),
        ("limits: {max_pods_per_caller: 0}", "say off"),
        ("output: {limit_mib: 0}", "output.limit_mib"),
        ("sessions: {ttl_seconds: 10}", "between two signs of life"),
        ("listen: {port: 70000}", "65535"),
        ("[1, 2]", "expected `object`"),
        ("a: [", "not YAML"),
        ("!!python/object/apply:os.getcwd []", "not YAML"),
    ],
)
def test_what_is_wrong_is_named(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(file)
    assert said in str(refused.value)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "one", "other"),
    [
        ("pools: {a: {min_count: 3, max_count: 2}}", "min_count", "max_count"),
        ("listen: {host: 0.0.0.0, port: 80}", "listen.host", "listen.port"),
        (
            "transfer: {total_gib: 1, blob_limit_mib: 2048}",
            "transfer.total_gib",
            "transfer.blob_limit_mib",
        ),
        (
            "pools: {a: {max_queue_seconds: 8d}}",
            "transfer.retention_seconds",
            "pools.a.max_queue_seconds",
        ),
    ],
)
def test_unsafe_combinations_name_both_settings(
    file: Path, text: str, one: str, other: str
) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(file)
    assert one in str(refused.value)
    assert other in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        load(tmp_path / "missing.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "binary")
