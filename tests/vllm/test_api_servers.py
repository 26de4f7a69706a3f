"""`vllm serve` with two API servers before one engine: each prepares, what is there serves both.

With a corpus, which each of them reads.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from http_server import VllmProcess, save_chat_model
from prometheus_client.mmap_dict import MmapedDict
from server_requests import PASSAGES, query

import kvspan as kv
from kvspan.engine.local import LocalEngine
from serving import Reply

BLOCK = 32
AT_ONCE, MOST = 12, 120  # requests until both have answered: who is idle takes the next
PATH = "/v1/query/execute?temperature=0"


def answering(counts: Path) -> int:
    """Servers that have answered queries, by what each writes for Prometheus."""
    files = [str(file) for file in counts.glob("counter_*.db")]
    keys = [[key for key, *_ in MmapedDict.read_all_values_from_file(file)] for file in files]
    return sum(any("kvspan_requests_total" in key for key in some) for some in keys)


@pytest.fixture
def vllm_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `vllm` command, which asks for a distribution of that name: CPU builds have another."""
    told = tmp_path / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    told.parent.mkdir()
    told.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    for name, first in (("PYTHONPATH", tmp_path), ("PATH", Path(sys.executable).parent)):
        old = os.environ.get(name)
        monkeypatch.setenv(name, os.pathsep.join([str(first), *([old] if old else [])]))


@pytest.mark.usefixtures("vllm_command")
def test_two_api_servers(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "model")
    orders = [PASSAGES[:3], PASSAGES[2::-1]]
    with LocalEngine.open(str(folder), kv_cache_gib=0.02, block_size=BLOCK) as local:
        expected = [
            kv.run(
                kv.loads(json.dumps(query(*order))), engine=local, model="tiny", temperature=0
            ).answers
            for order in (*orders, [PASSAGES[1]])
        ]
    corpus, counts = tmp_path / "town.jsonl", tmp_path / "counts"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    counts.mkdir()
    env = {
        "KVSPAN_CORPORA": json.dumps({"paths": {"town": str(corpus)}}),
        "PROMETHEUS_MULTIPROC_DIR": str(counts),
    }
    flags = ("--api-server-count", "2", "--block-size", str(BLOCK))
    with VllmProcess(folder, *flags, **env) as server, ThreadPoolExecutor(AT_ONCE) as threads:

        def ask(number: int) -> Reply:
            return server.post(PATH, query(*orders[number % 2]))

        asked = 0
        while answering(counts) < 2 and asked < MOST:
            for number, reply in enumerate(threads.map(ask, range(AT_ONCE))):
                assert reply.status == 200, reply.data
                answers = [c["message"]["content"] for c in reply.json["choices"]]
                assert answers == expected[number % 2]
                reuse = reply.json["kvspan"]["calls"][0]["reuse"]
                assert reuse["notes"] == []
                assert not asked or reuse["span_hits"] == 3, "also what the other one prepared"
            asked += AT_ONCE
        assert answering(counts) == 2
        found = query("-")
        found["g"]["input"]["cross"][1] = {
            "kvspan/v1": {
                "retrieve": {"corpus": "town", "query": {"user": PASSAGES[1]}, "limit": 1}
            }
        }
        reply = server.post(PATH, found)
        assert reply.status == 200, reply.data
        assert [c["message"]["content"] for c in reply.json["choices"]] == expected[2]
        assert server.vllm_metric("kvspan_requests_total") == asked + 1, "counted together"
        assert server.vllm_metric("vllm:kvspan_span_tokens_hit_total") > 0
