"""Policies: what an operator may set, with every unsafe value refused by its name.

``PoolPolicy.from_mapping`` and ``PoolPolicies.from_mapping`` decode what a configuration file says,
strictly: an unknown knob is refused with the nearest known one. For knobs that can be switched
off, ``off`` is a word, never a number (YAML reads an unquoted ``off`` as false; both are taken).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal

from firepool_broker.core.errors import NoGpuPool, PolicyError, ShapeImpossible, UnknownSku

TagPolicy = Literal["retire", "hint"]
EMBEDDED_CEILING: Final = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """Hardware of one pod.

    Parameters
    ----------
    gpu
        Number of GPUs.
    cpu
        Cores.
    memory_gib
        Memory in GiB.
    gpu_model
        Accelerator model; None for pools without GPUs.
    """

    gpu: int = 0
    cpu: float = 1.0
    memory_gib: float = 1.0
    gpu_model: str | None = None

    def fits(self, gpu: float, cpu: float, memory_gib: float) -> bool:
        """Whether a request of this size fits into the shape."""
        return gpu <= self.gpu and cpu <= self.cpu and memory_gib <= self.memory_gib


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """Policy of one pool. Durations are seconds, counts are pods; None stands for "off".

    Parameters
    ----------
    name, shape, description
        The pool's name (its SKU), hardware and a line for people.
    min_count
        Floor: pods kept ready without demand.
    max_idle_count
        Idle cap: unheld idle pods kept past their keep-alive. It retains, it never creates.
    max_count
        Ceiling: pods of every state.
    idle_timeout_seconds
        Keep-alive of a never-used pod.
    caller_hold_seconds
        How long a used pod stays reserved for its last caller; None inherits the keep-alive.
    step
        Creations allowed in one reconcile interval.
    tag_policy
        ``retire``: a pod that serves another session of its caller retires afterwards.
        ``hint``: the same session is preferred, nothing retires for it.
    drain_budget
        Pods of an old template that may retire at once for the new one.
    starve_after_seconds
        A job blocked at the ceiling for this long is entitled to the next slot.
    hold_break_tenure_seconds, hold_break_held_seconds
        Holds are broken only on pods at least this old and held for at least this long.
    max_jobs_per_pod, max_pod_lifetime_seconds
        Reuse caps; None is off.
    max_queue_seconds
        A job queued for longer fails with ``QueueTimeout``; None is off.
    pod_start_seconds
        Expected time of a pod start, until starts have been measured.
    start_timeout_seconds, reset_timeout_seconds
        A pod that is not ready, or not reset, after this long is given up.
    """

    name: str
    shape: Shape = field(default_factory=Shape)
    description: str = ""
    min_count: int = 0
    max_idle_count: int = 2
    max_count: int = EMBEDDED_CEILING
    idle_timeout_seconds: float = 600.0
    caller_hold_seconds: float | None = None
    step: int = EMBEDDED_CEILING
    tag_policy: TagPolicy = "retire"
    drain_budget: int = 1
    starve_after_seconds: float = 60.0
    hold_break_tenure_seconds: float = 60.0
    hold_break_held_seconds: float = 10.0
    max_jobs_per_pod: int | None = None
    max_pod_lifetime_seconds: float | None = None
    max_queue_seconds: float | None = None
    pod_start_seconds: float = 2.0
    start_timeout_seconds: float = 600.0
    reset_timeout_seconds: float = 120.0

    def __post_init__(self) -> None:
        self._check_numbers()
        if not self.name or "/" in self.name or self.name != self.name.strip():
            raise PolicyError("pools", f"{self.name!r} is no pool name")
        if self.min_count > self.max_count:
            self._refuse("min_count", f"floor {self.min_count} is above max_count {self.max_count}")
        if self.max_idle_count > self.max_count:
            self._refuse(
                "max_idle_count", f"{self.max_idle_count} is above max_count {self.max_count}"
            )
        if self.tag_policy not in ("retire", "hint"):
            self._refuse("tag_policy", f"{self.tag_policy!r} is neither 'retire' nor 'hint'")
        if self.shape.gpu < 0 or self.shape.cpu <= 0 or self.shape.memory_gib <= 0:
            self._refuse("shape", "cpu and memory_gib must be above 0, gpu at least 0")
        if self.start_timeout_seconds < self.pod_start_seconds:
            self._refuse(
                "start_timeout_seconds",
                f"{self.start_timeout_seconds:g} gives a pod up before its start is over "
                f"(pod_start_seconds {self.pod_start_seconds:g})",
            )
        lifetime = self.max_pod_lifetime_seconds
        if lifetime is not None and lifetime <= self.pod_start_seconds:
            self._refuse(
                "max_pod_lifetime_seconds",
                f"{lifetime:g} ends pods before they have started "
                f"(pod_start_seconds {self.pod_start_seconds:g}); say off to have no such cap",
            )

    def _check_numbers(self) -> None:
        for knob in (*_INTEGER_KNOBS, *_SECONDS_KNOBS):
            value = getattr(self, knob)
            if value is None:
                if knob not in _OFF_KNOBS and knob != "caller_hold_seconds":
                    self._refuse(knob, "cannot be off")
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                self._refuse(knob, f"{value!r} is not a number")
            if math.isnan(value):
                self._refuse(knob, "is not a number")
            if knob in _INTEGER_KNOBS and not isinstance(value, int):
                self._refuse(knob, f"{value!r} is not a whole number")
            least = _LEAST.get(knob, 0)
            strict = knob in _ABOVE_ZERO
            if value < least or (strict and value <= 0):
                off = "; say off to switch it off" if knob in _OFF_KNOBS else ""
                bound = "above 0" if strict and least == 0 else f"at least {least}"
                self._refuse(knob, f"{value!r} must be {bound}{off}")

    def _refuse(self, knob: str, message: str) -> None:
        raise PolicyError(f"pools.{self.name}.{knob}", message)

    @property
    def hold_seconds(self) -> float:
        """How long a used pod is held: ``caller_hold_seconds``, else the keep-alive."""
        if self.caller_hold_seconds is None:
            return self.idle_timeout_seconds
        return self.caller_hold_seconds

    def as_dict(self) -> dict[str, Any]:
        """Return every knob by name, for ``GET /v1/pools``."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, name: str, values: Mapping[str, Any]) -> PoolPolicy:
        """Decode one pool of a configuration file.

        Raises
        ------
        PolicyError
            An unknown knob (with the nearest known one) or a value that is not safe.
        """
        where = f"pools.{name}"
        known = {entry.name for entry in fields(cls)} - {"name"}
        decoded = _decode(where, values, known)
        shape = decoded.get("shape")
        if isinstance(shape, Mapping):
            parts = _decode(f"{where}.shape", shape, {entry.name for entry in fields(Shape)})
            decoded["shape"] = Shape(**parts)
        elif shape is not None and not isinstance(shape, Shape):
            raise PolicyError(f"{where}.shape", f"{shape!r} is not a mapping")
        return cls(name=name, **decoded)


_INTEGER_KNOBS: Final = (
    "min_count",
    "max_idle_count",
    "max_count",
    "step",
    "drain_budget",
    "max_jobs_per_pod",
)
_SECONDS_KNOBS: Final = tuple(
    entry.name for entry in fields(PoolPolicy) if entry.name.endswith("_seconds")
)
_OFF_KNOBS: Final = frozenset({"max_jobs_per_pod", "max_pod_lifetime_seconds", "max_queue_seconds"})
_ABOVE_ZERO: Final = frozenset(
    {
        "idle_timeout_seconds",
        "caller_hold_seconds",
        "starve_after_seconds",
        "max_pod_lifetime_seconds",
        "max_queue_seconds",
        "pod_start_seconds",
        "start_timeout_seconds",
        "reset_timeout_seconds",
    }
)
_LEAST: Final[Mapping[str, int]] = {
    "max_count": 1,
    "step": 1,
    "drain_budget": 1,
    "max_jobs_per_pod": 1,
}


@dataclass(frozen=True, slots=True)
class PoolPolicies:
    """All pools and what holds across them.

    Parameters
    ----------
    pools
        The policies, in the order in which people see them.
    default
        Pool of a request that names none; None refuses such a request with the list.
    max_pods_per_caller, max_gpus_per_caller
        What one caller's jobs may use at once, over all pools; None is off.
    session_ttl_seconds
        A session whose client is away lapses after this long.
    max_infra_retries
        Retries of attempts lost to pods, nodes or launches.
    reconcile_seconds
        Interval of reconcile passes; demand starts one at once.
    terminate_grace_seconds
        Between asking a job to end and killing it.
    """

    pools: tuple[PoolPolicy, ...]
    default: str | None = None
    max_pods_per_caller: int | None = None
    max_gpus_per_caller: int | None = None
    session_ttl_seconds: float = 30.0
    max_infra_retries: int = 3
    reconcile_seconds: float = 30.0
    terminate_grace_seconds: float = 10.0

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        for name in names:
            if names.count(name) > 1:
                raise PolicyError(f"pools.{name}", "is configured twice")
        if self.default is not None and self.default not in names:
            raise PolicyError("default", f"{self.default!r} is not among the pools {names}")
        for knob in ("max_pods_per_caller", "max_gpus_per_caller"):
            value = getattr(self, knob)
            if value is not None and (isinstance(value, bool) or value < 1):
                raise PolicyError(knob, f"{value!r} must be at least 1; say off to switch it off")
        for knob in ("session_ttl_seconds", "reconcile_seconds"):
            if not getattr(self, knob) > 0:
                raise PolicyError(knob, f"{getattr(self, knob)!r} must be above 0")
        for knob in ("max_infra_retries", "terminate_grace_seconds"):
            if getattr(self, knob) < 0:
                raise PolicyError(knob, f"{getattr(self, knob)!r} must be at least 0")

    def get(self, name: str) -> PoolPolicy:
        """Return the policy of a pool.

        Raises
        ------
        UnknownSku
            No pool has this name; the nearest one is named.
        """
        for pool in self.pools:
            if pool.name == name:
                return pool
        names = [pool.name for pool in self.pools]
        if name.lower().startswith("gpu") and not self._has_gpus:
            raise NoGpuPool(names, "sku")
        nearest = difflib.get_close_matches(name, names, n=1)
        raise UnknownSku(name, names, nearest[0] if nearest else None)

    @property
    def _has_gpus(self) -> bool:
        return any(pool.shape.gpu for pool in self.pools)

    def resolve(
        self,
        sku: str | None,
        gpu: float = 0,
        cpu: float = 0,
        memory_gib: float = 0,
        gpu_model: str | None = None,
    ) -> PoolPolicy:
        """Return the pool for a request: the one named, else the smallest that fits its shape.

        Parameters
        ----------
        sku
            Pool name; None to choose by shape, or the default when the shape asks for nothing.
        gpu, cpu, memory_gib, gpu_model
            The shape asked for; zeros and None ask for nothing.

        Raises
        ------
        UnknownSku
            No such pool, or none named and no default configured.
        ShapeImpossible
            No pool (or not the one named) is large enough.
        NoGpuPool
            A GPU is asked for and no pool has one.
        """
        shaped = bool(gpu or cpu or memory_gib or gpu_model)
        if sku is not None:
            pool = self.get(sku)
            if shaped and not pool.shape.fits(gpu, cpu, memory_gib):
                raise ShapeImpossible(
                    f"{sku} has {_describe(pool.shape)}, which is less than the shape asked for; "
                    "leave out sku or ask for less",
                    field="shape",
                )
            return pool
        if not shaped:
            if self.default is None:
                raise UnknownSku("", [pool.name for pool in self.pools])
            return self.get(self.default)
        # A GPU is never handed to a request that asked for none.
        fitting = [
            pool
            for pool in self.pools
            if pool.shape.fits(gpu, cpu, memory_gib)
            and (gpu > 0 or gpu_model is not None or pool.shape.gpu == 0)
            and (gpu_model is None or pool.shape.gpu_model == gpu_model)
        ]
        if (gpu or gpu_model) and not self._has_gpus:
            raise NoGpuPool([pool.name for pool in self.pools], "shape")
        if not fitting:
            offered = "; ".join(f"{pool.name}: {_describe(pool.shape)}" for pool in self.pools)
            wanted = _describe(Shape(math.ceil(gpu), cpu, memory_gib, gpu_model))
            raise ShapeImpossible(
                f"no pool fits {wanted} (pools: {offered or 'none'})", field="shape"
            )
        return min(
            fitting, key=lambda pool: (pool.shape.gpu, pool.shape.cpu, pool.shape.memory_gib)
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> PoolPolicies:
        """Decode the policies of a configuration file: ``pools`` by name, and the other knobs.

        Raises
        ------
        PolicyError
            An unknown knob (with the nearest known one) or a value that is not safe.
        """
        decoded = _decode("", values, {entry.name for entry in fields(cls)})
        pools = decoded.pop("pools", {})
        if not isinstance(pools, Mapping):
            raise PolicyError("pools", "must be a mapping of pool names")
        return cls(
            pools=tuple(PoolPolicy.from_mapping(str(name), one) for name, one in pools.items()),
            **decoded,
        )


def embedded_policies(
    cores: float, memory_gib: float, gpus: Mapping[str, int] | None = None
) -> PoolPolicies:
    """Return the pools of a machine on which nothing is configured.

    Parameters
    ----------
    cores, memory_gib
        The whole machine's.
    gpus
        Number of cards by model; one pool is made for each model.
    """
    cpu_small = Shape(cpu=min(2.0, cores), memory_gib=min(4.0, memory_gib))
    pools = [
        PoolPolicy("cpu-small", cpu_small, "two cores, for most cells", min_count=1),
        PoolPolicy("cpu", Shape(cpu=cores, memory_gib=memory_gib), "all cores of this machine"),
    ]
    found = dict(gpus or {})
    for model, count in sorted(found.items()):
        slug = "-".join("".join(c if c.isalnum() else " " for c in model.lower()).split())
        pools.append(
            PoolPolicy(
                "gpu" if len(found) == 1 else f"gpu-{slug}",
                Shape(1, cores, memory_gib, model),
                f"one {model}",
                max_count=count,
                max_idle_count=min(2, count),
                step=count,
            )
        )
    return PoolPolicies(tuple(pools), default="cpu-small")


def _describe(shape: Shape) -> str:
    parts = []
    if shape.gpu:
        parts.append(f"{shape.gpu} × {shape.gpu_model or 'GPU'}")
    if shape.cpu:
        parts.append(f"{shape.cpu:g} cores")
    if shape.memory_gib:
        parts.append(f"{shape.memory_gib:.3g} GiB")
    return ", ".join(parts)


def _decode(where: str, values: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Return the values with ``off`` as None, refusing every unknown key by name."""
    if not isinstance(values, Mapping):
        raise PolicyError(where or "pools", f"{values!r} is not a mapping")
    decoded: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{where}.{key}" if where else str(key)
        if key not in known:
            nearest = difflib.get_close_matches(str(key), sorted(known), n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise PolicyError(name, f"is no knob{hint}")
        if key in _OFF_KNOBS or key in ("max_pods_per_caller", "max_gpus_per_caller"):
            value = None if value is False or value == "off" else value
        decoded[key] = value
    return decoded
