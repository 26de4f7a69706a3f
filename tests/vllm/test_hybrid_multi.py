"""Hybrids with vLLM's offloading connector beside kvspan's, under MultiConnector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from host_offloading import OFFLOADING, HostWorker
from hybrid_checks import BASE, ROUNDING, SUFFIX, tokens
from hybrid_served import HybridServed, difference, save_hybrid
from served import CONNECTOR

from kvspan.vllm.hybrid.connector import HybridConnector


@pytest.fixture(scope="module", params=["kvspan first", "kvspan last"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HybridServed]:
    connectors: list[dict[str, Any]] = [CONNECTOR, OFFLOADING]
    if request.param == "kvspan last":
        connectors.reverse()
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": connectors},
    }
    folder = save_hybrid("qwen3_5", tmp_path_factory.mktemp("multi"))
    served = HybridServed(folder, "align", connector=False, kv_transfer_config=both)
    yield served
    served.close()


@pytest.fixture
def own(served: HybridServed) -> HybridConnector:
    """kvspan's connector; both start empty."""
    assert served.llm.reset_prefix_cache(reset_connector=True)
    HostWorker.copied.update(stored=0, loaded=0)
    (own,) = (c for c in served.connector.sub_connectors if isinstance(c, HybridConnector))
    return own


PROMPT = BASE[:900] + tokens(2, SUFFIX)


def first(served: HybridServed) -> bool:
    return isinstance(served.connector.sub_connectors[0], HybridConnector)


def test_beside_vllms_offloading_connector(served: HybridServed, own: HybridConnector) -> None:
    (full,) = served.ask([PROMPT])
    assert full.cached == 0
    (parts,) = served.ask([BASE[:900] + tokens(3, SUFFIX)])
    assert (parts.cached, parts.replay["matched"]) == (900, 900)
    assert HostWorker.copied["stored"] > 0
    assert served.llm.reset_prefix_cache()
    (answer,) = served.ask([PROMPT])
    assert difference(answer, full) < ROUNDING
    if first(served):
        assert (answer.cached, answer.replay["matched"]) == (959, 959)
    else:  # what the other one has is taken, to its last whole block
        assert (answer.cached, answer.replay["matched"]) == (768, 0)
        assert HostWorker.copied["loaded"] > 0


def test_what_the_other_one_loaded_is_a_source_only_from_there(
    served: HybridServed, own: HybridConnector
) -> None:
    """kvspan has seen no vectors of the tokens that another connector brought."""
    (full,) = served.ask([PROMPT])
    other = BASE[:850] + tokens(4, SUFFIX)
    (expected,) = served.ask([other], replay="off")
    assert served.llm.reset_prefix_cache()
    own.reset_cache()
    (answer,) = served.ask([PROMPT])
    assert (answer.cached, answer.replay["matched"]) == (768, 0)
    assert difference(answer, full) < ROUNDING
    assert served.llm.reset_prefix_cache()
    for _ in range(2):
        (answer,) = served.ask([other])
        assert (answer.cached, answer.replay["matched"]) == (768, 0)
        assert difference(answer, expected) < ROUNDING


@pytest.mark.parametrize("m", [777, 768])
def test_nothing_approximate_is_offloaded_for_others(
    served: HybridServed, own: HybridConnector, m: int
) -> None:
    long = BASE[:m] + tokens(6, 900)
    (full,) = served.ask([long], replay="off")
    assert served.llm.reset_prefix_cache(reset_connector=True)
    served.ask([BASE[:1200]], 1)
    assert served.llm.reset_prefix_cache()
    (rough,) = served.ask([long], replay="zero")
    assert rough.cached == m and not rough.replay["exact"]
    stored = HostWorker.copied["stored"]
    assert served.llm.reset_prefix_cache()
    own.reset_cache()
    (answer,) = served.ask([long])
    assert answer.cached <= m, "none of its blocks from there on"
    assert difference(answer, full) < ROUNDING
    assert HostWorker.copied["stored"] > stored, "those of the exact request are"
