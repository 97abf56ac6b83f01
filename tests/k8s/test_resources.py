"""What deployments ask for is offered by the worker group meant for them, and only there."""

import copy

import pytest

from tests.k8s.demand import GROUPS, demands, fitting, groups
from tests.k8s.kubectl import Manifest
from tests.k8s.manifests import Manifests


def test_replicas_fit_their_own_group_and_no_other(objects: list[Manifest]) -> None:
    """So a target's node is never spent on a draft, and a supervisor is where its children are."""
    manifests = Manifests(objects)
    offered = groups(manifests)
    for name, demand in demands(manifests).items():
        wanted = GROUPS[name.split("-")[0]]
        found = fitting(demand, offered)
        assert len(found) == 1, (name, demand.total, found)
        assert found.pop().startswith(wanted), name
        assert demand.strategy == "STRICT_PACK", name


def test_every_group_is_wanted(objects: list[Manifest]) -> None:
    """No node waits for work that never comes."""
    manifests = Manifests(objects)
    offered = groups(manifests)
    used = {group for each in demands(manifests).values() for group in fitting(each, offered)}
    assert used == set(manifests.groups)


def test_one_replica_takes_a_node_as_a_whole(objects: list[Manifest]) -> None:
    """A pod's own resources are one replica's: two never share one, nor is a GPU left over."""
    manifests = Manifests(objects)
    offered = groups(manifests)
    for name, demand in demands(manifests).items():
        [group] = fitting(demand, offered)
        shared = {"CPU", "memory", "object_store_memory"}
        own = {what: much for what, much in demand.total.items() if what not in shared and much}
        had = offered[group]["resources"]
        assert own == {what: had[what] for what in own}, name
        assert len(own) >= 1, name


def test_a_group_has_room_for_all_of_a_node_together(objects: list[Manifest]) -> None:
    """What may share a node, as gateway and router do, fits beside each other."""
    manifests = Manifests(objects)
    offered = groups(manifests)
    cpus = dict.fromkeys(offered, 0.0)
    for demand in demands(manifests).values():
        [group] = fitting(demand, offered)
        cpus[group] += demand.total["CPU"]
    assert all(cpus[name] <= group["resources"]["CPU"] for name, group in offered.items())


def test_there_are_nodes_for_everyone(objects: list[Manifest]) -> None:
    """At first without waiting, and at most also while old and new replicas are there at once."""
    manifests = Manifests(objects)
    offered = groups(manifests)
    for name, demand in demands(manifests).items():
        if name == "Router":
            continue
        [group] = fitting(demand, offered)
        assert offered[group]["min_workers"] == demand.at_first, name
        assert offered[group]["max_workers"] >= demand.most_while_replaced, name


def test_ray_counts_what_kubernetes_gives(objects: list[Manifest]) -> None:
    """A node has as many CPUs and GPUs for Ray as its container may use; the head has none."""
    manifests = Manifests(objects)
    for name, group in groups(manifests).items():
        if name == "head":
            assert group["resources"]["CPU"] == 0
            continue
        [container] = manifests.groups[name]["template"]["spec"]["containers"]
        limits, requests = container["resources"]["limits"], container["resources"]["requests"]
        assert group["resources"]["CPU"] == int(limits["cpu"])
        assert group["resources"].get("GPU", 0) == int(limits.get("nvidia.com/gpu", 0))
        assert limits["memory"] == requests["memory"]


@pytest.mark.parametrize(
    ("name", "asked", "problem"),
    [
        ("local-cpu", {"CPU": 1.0}, 2),  # a target of no group in particular fits the gateways'
        ("gpu", {"CPU": 1.0, "GPU": 1.0, "target": 1}, 0),  # a name that no group has
        ("gpu", {"CPU": 7.99, "GPU": 1.0, "target-gpu": 1}, 0),  # no room for the supervisor
        ("production", {"CPU": 6.0, "GPU": 2.0, "target-gpu": 1}, 0),  # two ranks, four GPUs
    ],
)
def test_a_wrong_demand_is_found(
    rendered: dict[str, list[Manifest]], name: str, asked: dict[str, float], problem: int
) -> None:
    """The checks above can fail: such a target fits `problem` groups and not one."""
    objects = copy.deepcopy(rendered[name])
    manifests = Manifests(objects)
    config = manifests.serve_config
    config["applications"][0]["args"]["target"]["resources"] = asked
    manifests.of("RayService")[0]["spec"]["serveConfigV2"] = str(config)
    assert len(fitting(demands(manifests)["Target"], groups(manifests))) == problem
