"""The broker's configuration: a YAML file, decoded strictly into documented types.

The contract: an unknown setting is refused with the nearest known one, a combination that is not
safe is refused naming both settings, and whatever is left out has the default that stands beside
its declaration. Durations are seconds, as a number or as text like ``10m`` or ``1h 30m``; what can
be switched off takes the word ``off``, never a number.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field, structs

from firepool_broker import strict
from firepool_broker.core.errors import PolicyError
from firepool_broker.core.policy import PoolPolicies, PoolPolicy, embedded_policies

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\s*\d+(?:\.\d+)?\s*(?:ms|[smhd])\b)+\s*|\s*\d+(?:\.\d+)?\s*")
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[smhd])?")
_HEARTBEAT_SECONDS = 10.0
"""How often a session's stream says that it is there."""

Off = Literal["off"]


class ConfigError(ValueError):
    """The configuration cannot be used.

    Parameters
    ----------
    message
        What is wrong, with the names of the settings and the fix.
    setting
        Full name of the setting at fault.
    """

    def __init__(self, message: str, setting: str | None = None) -> None:
        super().__init__(message)
        self.setting = setting


class Seconds(float):
    """A duration in seconds."""


class SecondsOrOff(float):
    """A duration in seconds; infinite when it is switched off."""

    @property
    def or_none(self) -> float | None:
        """The duration, ``None`` when it is switched off."""
        return None if math.isinf(self) else float(self)


OFF = SecondsOrOff(math.inf)


class _Section(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Base of every section."""


class ShapeConfig(_Section, frozen=True):
    """Hardware of one pod."""

    gpu: int = 0
    """Number of GPUs."""
    cpu: float = 1.0
    """Cores."""
    memory_gib: float = 1.0
    """Memory in GiB."""
    gpu_model: str | None = None
    """Accelerator model, for pools with GPUs."""


class PoolConfig(_Section, frozen=True):
    """One pool: a hardware shape with its scaling policy."""

    shape: ShapeConfig = ShapeConfig()
    """Hardware of its pods."""
    description: str = ""
    """A line for people."""
    min_count: int = 0
    """Floor: pods kept ready without demand."""
    max_idle_count: int = 2
    """Idle cap: idle pods kept past their keep-alive."""
    max_count: int = 8
    """Ceiling: pods in every state."""
    idle_timeout_seconds: Seconds = Seconds(600.0)
    """Keep-alive of a pod that was never used."""
    caller_hold_seconds: Seconds | None = None
    """How long a used pod stays reserved for its last caller; left out, the keep-alive."""
    step: int = 8
    """Pods that may be created in one reconcile interval."""
    tag_policy: Literal["retire", "hint"] = "retire"
    """`retire`: a pod that serves another session of its caller retires afterwards. `hint`: the
    same session is preferred and nothing retires for it."""
    drain_budget: int = 1
    """Pods of an old template that retire at once for a new one."""
    starve_after_seconds: Seconds = Seconds(60.0)
    """A job blocked at the ceiling for this long is entitled to the next slot."""
    hold_break_tenure_seconds: Seconds = Seconds(60.0)
    """A hold is broken only on a pod at least this old."""
    hold_break_held_seconds: Seconds = Seconds(10.0)
    """A hold is broken only when it stood at least this long."""
    max_jobs_per_pod: int | Off = "off"
    """A pod is replaced after this many jobs."""
    max_pod_lifetime_seconds: SecondsOrOff = OFF
    """A pod is replaced at this age."""
    max_queue_seconds: SecondsOrOff = OFF
    """A job queued for longer fails with `QueueTimeout`."""
    pod_start_seconds: Seconds = Seconds(2.0)
    """Expected time of a pod's start, until starts were measured."""
    start_timeout_seconds: Seconds = Seconds(600.0)
    """A pod that is not ready after this long is given up."""
    reset_timeout_seconds: Seconds = Seconds(120.0)
    """A pod that is not reset after this long is given up."""
    preload: list[str] = field(default_factory=list)
    """Modules that the pool's spares import ahead."""

    def policy(self, name: str) -> PoolPolicy:
        """Return the policy for the core; raises ``PolicyError``."""
        values: dict[str, Any] = {}
        for knob in PoolPolicy.__dataclass_fields__:
            if knob == "name":
                continue
            value = getattr(self, knob)
            if isinstance(value, ShapeConfig):
                value = structs.asdict(value)
            elif isinstance(value, SecondsOrOff):
                value = "off" if value.or_none is None else float(value)
            elif isinstance(value, Seconds):
                value = float(value)
            values[knob] = value
        return PoolPolicy.from_mapping(name, values)


class LimitsConfig(_Section, frozen=True):
    """Limits that hold across pools."""

    max_pods_per_caller: int | Off = "off"
    """Pods that one caller's jobs use at once."""
    max_gpus_per_caller: int | Off = "off"
    """GPUs that one caller's jobs use at once."""
    max_infra_retries: int = 3
    """Retries of attempts lost to pod, machine or broker; never charged to the user."""
    job_timeout_seconds: SecondsOrOff = OFF
    """Timeout of a job that names none."""
    terminate_grace_seconds: Seconds = Seconds(10.0)
    """Between asking a job to end and killing it."""


class SessionsConfig(_Section, frozen=True):
    """Sessions."""

    ttl_seconds: Seconds = Seconds(30.0)
    """A session whose client is away lapses after this long."""
    directory_retention_seconds: Seconds = Seconds(7 * 86400.0)
    """How long a lapsed session's directory is kept."""


class OutputConfig(_Section, frozen=True):
    """Outputs of jobs."""

    limit_mib: int = 64
    """Output kept of one job, MiB: its first and its last half."""
    retention_seconds: Seconds = Seconds(7 * 86400.0)
    """How long output, and the record of an ended job, is kept."""


class TransferConfig(_Section, frozen=True):
    """Values and packages that travel to pods and back."""

    inline_result_kib: int = 64
    """Results up to this size travel inline, KiB; larger ones become blobs."""
    blob_limit_mib: int = 2048
    """Size of one value, MiB."""
    package_limit_mib: int = 512
    """Size of one package, MiB, compressed."""
    total_gib: int = 20
    """Space for all blobs and packages, GiB; the least recently used go first."""
    retention_seconds: Seconds = Seconds(7 * 86400.0)
    """How long an unused blob or package is kept."""


class RequirementsConfig(_Section, frozen=True):
    """Requirements that jobs install."""

    index_url: str | None = None
    """Package index; left out, the installer's own."""


class ListenConfig(_Section, frozen=True):
    """Where the API listens besides its Unix socket."""

    host: str = "127.0.0.1"
    """Address; only loopback addresses, since the token would travel in clear text."""
    port: int | Off = "off"
    """TCP port; 0 takes a free one."""


class BrokerConfig(_Section, frozen=True):
    """The whole configuration."""

    pools: dict[str, PoolConfig] = field(default_factory=dict)
    """Pools by name. None: `cpu-small` (2 cores, 4 GiB, floor 1), `cpu` (all cores) and one pool
    for each kind of GPU found."""
    default_pool: str | None = None
    """Pool of a request that names none; left out, `cpu-small` or the only one."""
    isolation: Literal["auto", "process", "none"] = "auto"
    """What local pods are isolated by: `auto` takes namespaces where the machine allows them."""
    idle_exit_seconds: SecondsOrOff = SecondsOrOff(600.0)
    """The embedded broker ends when no session, job or panel has been there for this long."""
    reconcile_seconds: Seconds = Seconds(30.0)
    """Interval of the scaler's passes; demand starts one at once."""
    limits: LimitsConfig = LimitsConfig()
    """Limits that hold across pools."""
    sessions: SessionsConfig = SessionsConfig()
    """Sessions."""
    output: OutputConfig = OutputConfig()
    """Outputs of jobs."""
    transfer: TransferConfig = TransferConfig()
    """Values and packages that travel."""
    requirements: RequirementsConfig = RequirementsConfig()
    """Requirements that jobs install."""
    listen: ListenConfig = ListenConfig()
    """Where the API listens besides its Unix socket."""

    def policies(
        self, cores: float, memory_gib: float, gpus: Mapping[str, int] | None = None
    ) -> PoolPolicies:
        """Return what the core works with.

        Parameters
        ----------
        cores, memory_gib, gpus
            This machine's, for the pools of a configuration that names none.

        Raises
        ------
        ConfigError
            A value, or a pair of them, is not safe.
        """
        try:
            if self.pools:
                pools = tuple(pool.policy(name) for name, pool in self.pools.items())
                default = self.default_pool
                if default is None and "cpu-small" in self.pools:
                    default = "cpu-small"
                if default is None and len(pools) == 1:
                    default = pools[0].name
            else:
                found = embedded_policies(cores, memory_gib, gpus)
                pools, default = found.pools, self.default_pool or found.default
            return PoolPolicies(
                pools=pools,
                default=default,
                max_pods_per_caller=_or_none(self.limits.max_pods_per_caller),
                max_gpus_per_caller=_or_none(self.limits.max_gpus_per_caller),
                session_ttl_seconds=float(self.sessions.ttl_seconds),
                max_infra_retries=self.limits.max_infra_retries,
                reconcile_seconds=float(self.reconcile_seconds),
                terminate_grace_seconds=float(self.limits.terminate_grace_seconds),
            )
        except PolicyError as error:
            raise ConfigError(str(error), error.setting) from error

    def preload(self, pool: str) -> tuple[str, ...]:
        """Return the modules that a pool's spares import ahead."""
        known = self.pools.get(pool)
        return tuple(known.preload) if known is not None else ()


def load(path: Path | None, environment: Mapping[str, str] | None = None) -> BrokerConfig:
    """Read a configuration file.

    Parameters
    ----------
    path
        The file; ``None`` for the defaults.
    environment
        ``FIREPOOL_ISOLATION`` in it stands above the file.

    Raises
    ------
    ConfigError
        The file cannot be read, is no YAML, or says something that is refused.
    """
    values: object = {}
    where = ""
    if path is not None:
        where = f"{path}: "
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        values = _parsed(text, where)
    isolation = (environment or {}).get("FIREPOOL_ISOLATION")
    if isolation and isinstance(values, dict):
        values = {**values, "isolation": isolation}
    try:
        config = strict.convert(values, BrokerConfig, _seconds_from)
    except strict.NotStrict as error:
        message = str(error).replace("the body:", "the file:").replace("field", "setting", 1)
        raise ConfigError(where + message, error.field) from None
    try:
        _check(config)
        config.policies(1.0, 1.0)
    except ConfigError as error:
        raise ConfigError(where + str(error), error.setting) from error
    return config


def _parsed(text: str, where: str) -> object:
    import yaml  # a broker without a file starts without it

    class Loader(yaml.SafeLoader):
        """YAML 1.2's booleans only: ``off`` is a word here."""

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:bool", re.compile(r"true|True|false|False"), list("tTfF")
    )
    try:
        found: object = yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}not YAML: {error}") from error
    return {} if found is None else found


def _seconds_from(kind: type, value: Any) -> Any:
    """Convert a duration (msgspec's hook for types that it does not know)."""
    if kind is SecondsOrOff and value == "off":
        return OFF
    if kind is not Seconds and kind is not SecondsOrOff:
        raise NotImplementedError(kind)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and _DURATION.fullmatch(value):
        seconds = sum(float(number) * _UNITS[unit or "s"] for number, unit in _PART.findall(value))
    else:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        off = " or off" if kind is SecondsOrOff else ""
        raise ValueError(f"{value!r} is no duration; write seconds, 10m, 1h 30m{off}")
    return kind(seconds)


def _or_none(value: int | Off) -> int | None:
    return None if value == "off" else value


def _check(config: BrokerConfig) -> None:
    """Refuse values and combinations that are not safe."""
    for setting, value in (
        ("output.limit_mib", config.output.limit_mib),
        ("transfer.blob_limit_mib", config.transfer.blob_limit_mib),
        ("transfer.package_limit_mib", config.transfer.package_limit_mib),
        ("transfer.total_gib", config.transfer.total_gib),
    ):
        if value < 1:
            raise ConfigError(f"{setting}: {value} must be at least 1", setting)
    if not 0 <= config.transfer.inline_result_kib <= 16 * 1024:
        raise ConfigError(
            "transfer.inline_result_kib must be within 0 and 16384", "transfer.inline_result_kib"
        )
    for setting, seconds in (
        ("idle_exit_seconds", config.idle_exit_seconds),
        ("limits.job_timeout_seconds", config.limits.job_timeout_seconds),
        ("output.retention_seconds", config.output.retention_seconds),
        ("transfer.retention_seconds", config.transfer.retention_seconds),
    ):
        if seconds <= 0:
            raise ConfigError(f"{setting}: {seconds:g} must be above 0", setting)
    if config.sessions.ttl_seconds <= _HEARTBEAT_SECONDS:
        raise ConfigError(
            f"sessions.ttl_seconds: {config.sessions.ttl_seconds:g} must be above the "
            f"{_HEARTBEAT_SECONDS:g} s between two signs of life",
            "sessions.ttl_seconds",
        )
    if config.transfer.total_gib * 1024 < config.transfer.blob_limit_mib:
        raise ConfigError(
            f"transfer.total_gib ({config.transfer.total_gib}) is less than one value of "
            f"transfer.blob_limit_mib ({config.transfer.blob_limit_mib}); raise the one or lower "
            "the other",
            "transfer.total_gib",
        )
    for name, pool in config.pools.items():
        queued = pool.max_queue_seconds.or_none
        if queued is not None and queued >= config.transfer.retention_seconds:
            raise ConfigError(
                f"transfer.retention_seconds ({config.transfer.retention_seconds:g}) must be "
                f"above pools.{name}.max_queue_seconds ({queued:g}): a queued job's package "
                "would be deleted before it runs",
                "transfer.retention_seconds",
            )
    listen = config.listen
    if listen.port != "off":
        if not 0 <= listen.port <= 65535:
            raise ConfigError(
                f"listen.port: {listen.port} must be within 0 and 65535", "listen.port"
            )
        if not _loopback(listen.host):
            raise ConfigError(
                f"listen.host {listen.host!r} with listen.port {listen.port}: the owner's token "
                "would cross the network in clear text; listen on 127.0.0.1 and forward to it",
                "listen.host",
            )


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
