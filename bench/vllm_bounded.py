"""Replay within a bound on vLLM: what is replayed, from where, and what later requests gain.

Runs where vLLM is installed, on the small trained hybrid of tests/fixtures/tiny_hybrid (eager,
bfloat16, states kept every 2,048 tokens, which is also the longest step). All figures are counts:
they do not depend on the machine.

heads: how far before 7,000 tokens a replay from zero has to begin, for each head alone, to be
    within 1e-3; and what a page and a state take in the host tier.
branches: requests that leave a text of 8,000 tokens at random places. alone: from the nearest state
    that the text itself left.
chats: conversations behind one shared prompt, each turn with the answers before it.

    python bench/vllm_bounded.py
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("scripts", "tests/vllm", "tests/python")]
if importlib.util.find_spec("torchvision") is None:
    stubs = str(ROOT / "tests/vllm/stubs")
    sys.path.insert(0, stubs)
    # vLLM looks into a model's class in a process of its own.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [stubs, os.environ.get("PYTHONPATH")]))
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
import tiny_hybrid_task as task  # noqa: E402  found by the path above, as all below
from hybrid_served import HybridServed  # noqa: E402

from kvspan.vllm.hybrid import decay  # noqa: E402
from kvspan.vllm.hybrid.store import page_of, root_key  # noqa: E402
from kvspan.vllm.hybrid.tracking import Track  # noqa: E402

LENGTH, PROMPT, AT, EPS, EVERY = 8000, 3510, 7000, 1e-3, 2048
POLICIES = ("exact", "bounded:1e-3")
TEXT = list(task.text(held_out=True)[5000 : 5000 + LENGTH])


def heads(served: HybridServed) -> dict[str, Any]:
    """Tokens that each head needs, [layers][heads]; None: more than the text has."""
    store, settings = served.side.store, served.side.settings
    geometry, cells = store.geometry, store.geometry.cells
    root = root_key(None, "", geometry.size)
    keys = Track(settings, root, settings.policy).keys(TEXT)
    match = store.match(keys, root, np.asarray(TEXT, np.int64), AT)
    views = [store.tier.view(page.name) for page in match.pages]
    pages = [geometry.gates(page_of(view)) for view in views]
    at, sums = decay._joined(pages, AT, cells)
    norms = np.linalg.norm(cells.all_heads(cells.norms, pages[-2]), axis=1)
    bounds = decay._errors(sums, 0) / norms[:, None]
    found = []
    for layer in range(cells.layers):
        good = [
            np.flatnonzero(bounds[:, layer, h] <= decay.MARGIN * EPS) for h in range(cells.heads)
        ]
        found.append([AT - int(at[g[-1]]) if len(g) and at[g[-1]] else None for g in good])
    for view in views:
        view.release()
    return {
        "tokens": found,
        "page_bytes": geometry.page_bytes,
        "page_tokens": geometry.size,
        "state_bytes": geometry.state_bytes,
    }


def replayed(answer: Any, groups: int = 2) -> list[int]:
    """By group."""
    said = answer.replay
    return [group["replayed_tokens"] for group in said["groups"]] or [said["replayed"]] * groups


def branches(served: HybridServed, policy: str, count: int = 40) -> dict[str, Any]:
    served.forget()
    served.ask([[*TEXT, *[1] * 20]], 1)
    rng = random.Random(5)
    found, alone = [], 0
    for _ in range(count):
        m = rng.randrange(500, 7900)
        own = [7, *(rng.randrange(1, 200) for _ in range(30))]
        found.append(replayed(served.ask([TEXT[:m] + own], 1, replay=policy)[0]))
        alone += m % EVERY
    return {
        "replayed_mean": np.mean(found, 0).tolist(),
        "alone_mean": alone / count,
        "host_bytes": served.side.store.tier.held_bytes()[0],
    }


def chats(served: HybridServed, policy: str, count: int = 3, turns: int = 5) -> dict[str, Any]:
    served.forget()
    served.ask([TEXT[:PROMPT] + TEXT[6000:6300]], 1, replay=policy)
    rng = random.Random(5)
    computed, again = 0, np.zeros(2, int)
    for _ in range(count):
        talk = TEXT[:PROMPT]
        for _ in range(turns):
            at = rng.randrange(4000, 7000)
            talk = talk + TEXT[at : at + 300]
            (answer,) = served.ask([talk], 20, replay=policy)
            computed += len(talk) - answer.cached
            again += replayed(answer)
            talk = talk + list(answer.tokens)
    return {"computed": computed, "replayed": again.tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    served = HybridServed(
        ROOT / "tests/fixtures/tiny_hybrid",
        "none",
        extra={"k_min": 16, "decay": True, "state_every": EVERY},
        max_model_len=8192,
        max_num_batched_tokens=EVERY,
    )
    served.ask([[*TEXT, *[1] * 20]], 1)
    figures: dict[str, Any] = {"heads": heads(served)}
    for name, measure in (("branches", branches), ("chats", chats)):
        figures[name] = {policy: measure(served, policy) for policy in POLICIES}
    served.close()
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
