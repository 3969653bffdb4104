from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from rowdit.cost.collectives import Members, all_to_all_latency, all_to_all_pace, ring_seconds
from rowdit.cost.hardware import CLUSTERS, ClusterError, Link, cluster

H100 = CLUSTERS["h100"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_figure_has_a_source_and_is_possible(name: str) -> None:
    found = CLUSTERS[name]
    assert "datasheet" in found.source
    assert 0 < found.float32_flops < found.matmul_speed < found.peak_flops and 1e12 < found.memory_speed < 1e13
    for link in (found.inside, found.between):
        assert link.source and 0 < link.achieved < 1 and 1e-6 < link.base_seconds < link.base_seconds + link.hop_seconds
    assert found.between.speed < found.inside.speed


def test_a_cluster_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"like": "h100", "name": "mine", "ranks_per_node": 4, "matmul": 0.5}))
    found = cluster(str(path))
    assert (found.name, found.ranks_per_node, found.memory_rate) == ("mine", 4, H100.memory_rate)
    assert found.matmul_speed == 0.5 * H100.peak_flops
    link = {"rate": 1e9, "achieved": 0.5, "base_seconds": 0.0, "hop_seconds": 0.0}
    path.write_text(json.dumps({"like": "a100", "name": "slow", "between": link}))
    assert cluster(str(path)).between == Link(**link)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"like": "h100", "nmae": 1}', "unknown key 'nmae'"),
        ('{"name": "x"}', "missing"),
        ('{"like": "h101"}', "like = 'h101'; there are a100"),
        ('{"like": "h100", "inside": {"speed": 1}}', "inside: unknown key 'speed'"),
        ("{", "can't be read"),
    ],
)
def test_files_that_describe_no_cluster(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ClusterError, match=words):
        cluster(str(path))


def test_unknown_names() -> None:
    with pytest.raises(ClusterError, match="no cluster 'h10'; did you mean 'h100'"):
        cluster("h10")
    with pytest.raises(ClusterError, match="can't be read"):
        cluster("absent.json")


# ---- collectives

FREE = Link(100.0, 1.0, 0.0, 0.0)  # 100 bytes per second
SLOW = Link(10.0, 1.0, 0.0, 0.0)
PLAIN = dataclasses.replace(H100, inside=FREE, between=SLOW, ranks_per_node=4)


def test_members() -> None:
    assert Members.of(range(8), 8) == Members(8, 8) and Members.of(range(8), 8).num_nodes == 1
    assert Members.of(range(0, 64, 8), 8) == Members(8, 1)  # one of each machine
    assert Members.of(range(12), 8).num_nodes == 2


def test_rings() -> None:
    assert ring_seconds(1000, Members(1, 1), PLAIN) == 0
    assert ring_seconds(1000, Members(4, 4), PLAIN) == 10.0
    # eight ranks on two machines: 4 links of 10 between them, slower than 100 inside
    assert ring_seconds(1000, Members(8, 4), PLAIN) == 25.0
    assert ring_seconds(1000, Members(2, 1), PLAIN) == 100.0
    assert ring_seconds(0, Members(256, 8), H100) == pytest.approx(8.4e-6 + 224 * 3.4e-6 + 31 * 14e-6)


def test_all_to_all() -> None:
    assert all_to_all_pace(Members(1, 1), PLAIN) == all_to_all_latency(Members(1, 1), PLAIN) == 0
    assert 1000 * all_to_all_pace(Members(4, 4), PLAIN) == pytest.approx(10.0)
    # four of seven peers are on the other machine, reached over the rank's own link
    assert 700 * all_to_all_pace(Members(8, 4), PLAIN) == pytest.approx(40.0)
    half = dataclasses.replace(PLAIN, between=dataclasses.replace(SLOW, all_to_all=0.5))
    assert 700 * all_to_all_pace(Members(8, 4), half) == pytest.approx(80.0)
    assert all_to_all_latency(Members(8, 8), H100) == pytest.approx(8.4e-6 + 3.4e-6 + 7 * 0.5e-6)
    assert all_to_all_latency(Members(8, 4), H100) == pytest.approx(8.4e-6 + 14e-6 + 7 * 0.5e-6)
    assert ring_seconds(1000, Members(8, 4), half) == 25.0
