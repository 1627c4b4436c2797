"""Configured values: what is refused, by which name; which pool serves a request."""

from typing import Any

import pytest
from firepool_broker.core.errors import NoGpuPool, PolicyError, ShapeImpossible, UnknownSku
from firepool_broker.core.policy import PoolPolicies, PoolPolicy, Shape, embedded_policies

REFUSED = [
    ({"max_count": 0}, "max_count"),
    ({"max_count": -1}, "max_count"),
    ({"min_count": -1}, "min_count"),
    ({"min_count": 9}, "min_count"),
    ({"max_idle_count": 9}, "max_idle_count"),
    ({"step": 0}, "step"),
    ({"drain_budget": 0}, "drain_budget"),
    ({"max_count": 2.5}, "max_count"),
    ({"max_count": "8"}, "max_count"),
    ({"max_count": True}, "max_count"),
    ({"idle_timeout_seconds": 0}, "idle_timeout_seconds"),
    ({"idle_timeout_seconds": "off"}, "idle_timeout_seconds"),
    ({"caller_hold_seconds": 0}, "caller_hold_seconds"),
    ({"caller_hold_seconds": float("nan")}, "caller_hold_seconds"),
    ({"starve_after_seconds": 0}, "starve_after_seconds"),
    ({"max_jobs_per_pod": 0}, "max_jobs_per_pod"),
    ({"max_jobs_per_pod": -3}, "max_jobs_per_pod"),
    ({"max_pod_lifetime_seconds": 0}, "max_pod_lifetime_seconds"),
    ({"max_pod_lifetime_seconds": 30, "pod_start_seconds": 60}, "max_pod_lifetime_seconds"),
    ({"start_timeout_seconds": 1, "pod_start_seconds": 60}, "start_timeout_seconds"),
    ({"max_queue_seconds": -1}, "max_queue_seconds"),
    ({"tag_policy": "keep"}, "tag_policy"),
    ({"shape": {"cpu": 0}}, "shape"),
    ({"shape": 3}, "shape"),
    ({"shape": {"gpus": 1}}, "shape.gpus"),
    ({"max_cuont": 3}, "max_cuont"),
]


@pytest.mark.parametrize(("knobs", "name"), REFUSED, ids=[repr(case[0]) for case in REFUSED])
def test_unsafe_values_are_refused_by_name(knobs: dict[str, Any], name: str) -> None:
    with pytest.raises(PolicyError) as refusal:
        PoolPolicies.from_mapping({"pools": {"p": knobs}})
    assert refusal.value.setting == f"pools.p.{name}"


def test_a_misspelt_knob_names_the_likely_one() -> None:
    with pytest.raises(PolicyError, match="did you mean 'max_count'"):
        PoolPolicy.from_mapping("p", {"max_cuont": 3})


@pytest.mark.parametrize("word", ["off", False])
def test_off_is_a_word(word: Any) -> None:
    policy = PoolPolicy.from_mapping("p", {"max_jobs_per_pod": word})
    assert policy.max_jobs_per_pod is None


@pytest.mark.parametrize(
    ("knobs", "name"),
    [
        ({"default": "q"}, "default"),
        ({"max_pods_per_caller": 0}, "max_pods_per_caller"),
        ({"session_ttl_seconds": 0}, "session_ttl_seconds"),
        ({"max_infra_retries": -1}, "max_infra_retries"),
        ({"sesion_ttl_seconds": 3}, "sesion_ttl_seconds"),
        ({"pools": []}, "pools"),
    ],
)
def test_settings_across_pools(knobs: dict[str, Any], name: str) -> None:
    with pytest.raises(PolicyError) as refusal:
        PoolPolicies.from_mapping({"pools": {"p": {}}, **knobs})
    assert refusal.value.setting == name


def test_the_hold_inherits_the_keep_alive() -> None:
    assert PoolPolicy("p", idle_timeout_seconds=7).hold_seconds == 7
    assert PoolPolicy("p", idle_timeout_seconds=7, caller_hold_seconds=3).hold_seconds == 3


def test_embedded_defaults() -> None:
    policies = embedded_policies(16, 64, {"NVIDIA H200": 2})
    assert [pool.name for pool in policies.pools] == ["cpu-small", "cpu", "gpu"]
    small, cpu, gpu = policies.pools
    assert (small.min_count, small.max_idle_count, small.max_count) == (1, 2, 8)
    assert (small.shape.cpu, small.shape.memory_gib) == (2, 4)
    assert (cpu.min_count, cpu.shape.cpu) == (0, 16)
    assert (gpu.max_count, gpu.shape.gpu, gpu.min_count) == (2, 1, 0)
    assert (small.idle_timeout_seconds, small.hold_seconds) == (600, 600)
    assert policies.default == "cpu-small"
    two = embedded_policies(16, 64, {"A100": 1, "NVIDIA H200": 2})
    assert [pool.name for pool in two.pools][2:] == ["gpu-a100", "gpu-nvidia-h200"]
    assert embedded_policies(1, 2).pools[0].shape.cpu == 1


CATALOG = PoolPolicies(
    (
        PoolPolicy("big", Shape(cpu=16, memory_gib=64)),
        PoolPolicy("small", Shape(cpu=2, memory_gib=4)),
        PoolPolicy("h200", Shape(1, 8, 128, "H200")),
        PoolPolicy("h200x8", Shape(8, 64, 1024, "H200")),
        PoolPolicy("l4", Shape(1, 4, 32, "L4")),
    ),
    default="small",
)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"sku": "big"}, "big"),
        ({"sku": None}, "small"),
        ({"sku": None, "cpu": 1}, "small"),
        ({"sku": None, "cpu": 3}, "big"),
        ({"sku": None, "memory_gib": 5}, "big"),
        ({"sku": None, "gpu": 1}, "l4"),
        ({"sku": None, "gpu": 1, "cpu": 5}, "h200"),
        ({"sku": None, "gpu": 2}, "h200x8"),
        ({"sku": None, "gpu": 1, "gpu_model": "H200"}, "h200"),
        ({"sku": "h200", "gpu": 1}, "h200"),
    ],
)
def test_a_request_is_rounded_up_to_the_smallest_that_fits(
    request_: dict[str, Any], expected: str
) -> None:
    assert CATALOG.resolve(**request_).name == expected


@pytest.mark.parametrize(
    "request_",
    [
        {"sku": None, "gpu": 9},
        {"sku": None, "cpu": 32},
        {"sku": None, "gpu": 1, "gpu_model": "B300"},
        {"sku": "small", "gpu": 1},
    ],
)
def test_impossible_shapes(request_: dict[str, Any]) -> None:
    with pytest.raises(ShapeImpossible) as refusal:
        CATALOG.resolve(**request_)
    assert refusal.value.field == "shape"


@pytest.mark.parametrize(
    "request_",
    [{"sku": "gpu"}, {"sku": None, "gpu": 1}, {"sku": None, "gpu": 2, "gpu_model": "h200"}],
)
def test_a_machine_without_gpus_says_so(request_: dict[str, Any]) -> None:
    with pytest.raises(NoGpuPool, match=r"^this machine has no GPU pool; pools: cpu-small, cpu$"):
        embedded_policies(8, 23.54018).resolve(**request_)


def test_a_refused_shape_says_what_was_asked_for_and_no_more() -> None:
    with pytest.raises(ShapeImpossible) as refusal:
        embedded_policies(8, 23.54018).resolve(None, memory_gib=99.96)
    assert str(refusal.value) == (
        "no pool fits 100 GiB (pools: cpu-small: 2 cores, 4 GiB; cpu: 8 cores, 23.5 GiB)"
    )


def test_several_pools_without_a_default_are_listed() -> None:
    policies = PoolPolicies((PoolPolicy("a"), PoolPolicy("b")))
    with pytest.raises(UnknownSku, match=r"no pool was named and none is the default.*: a, b"):
        policies.resolve(None)


def test_unknown_pools_name_the_nearest() -> None:
    with pytest.raises(UnknownSku, match="did you mean 'h200'") as refusal:
        CATALOG.resolve("h20")
    assert refusal.value.field == "sku"
    with pytest.raises(UnknownSku, match="big, small"):
        CATALOG.get("zzz")
    with pytest.raises(UnknownSku):
        PoolPolicies(CATALOG.pools).resolve(None)
