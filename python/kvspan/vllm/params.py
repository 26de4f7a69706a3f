"""How a request tells vLLM's scheduler about its spans, and how it is told what became of them.

``kv_transfer_params={"kvspan": {"spans": [[start, end], ...], "scope": "anchored",
"placement": "sequential", "timeout_s": 30}}`` on a completion request, or in
``SamplingParams.extra_args`` offline. Positions are tokens of the prompt, on block boundaries; all
but the spans may be left out. The response's ``kv_transfer_params`` has
``{"kvspan": {...}}`` with the counts of `SpanAudit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvspan.engine import PLACEMENTS, Placement
from kvspan.errors import UsageError
from kvspan.layout import SpanLayout, layout_from_tokens
from kvspan.query.checks import closest

KEY = "kvspan"
PROBE = "kvspan-probe-"  # ids of requests that the server asks itself at start
DEFAULT_TIMEOUT_S = 30.0
MAX_TIMEOUT_S = 86_400
_FIELDS = ("spans", "scope", "placement", "timeout_s", "id", "prepare_for")
_OF_HYBRIDS = "replay"


@dataclass(frozen=True)
class SpanParams:
    """timeout_s: how long a request waits for its spans before it computes them itself.

    id: of the request, if it has preparations; they have it as prepare_for, and are counted apart.
    """

    layout: SpanLayout
    timeout_s: float = DEFAULT_TIMEOUT_S
    placement: Placement = "sequential"
    id: str = ""
    prepare_for: str = ""


@dataclass
class SpanAudit:
    """What became of a request's spans, in tokens. fallback: why spans were not used, or "".

    moved_tokens: copied to their place. in_place_tokens: of these, rotated where they lay (the
    connector's option "steer"). computed_tokens: computed by the request itself, under the
    mask of its scope. Both count again what a preempted request does again. host_tokens: of its
    spans and its anchor, brought back from the host before it could start.
    """

    span_tokens: int = 0
    moved_tokens: int = 0
    in_place_tokens: int = 0
    computed_tokens: int = 0
    host_tokens: int = 0
    fallback: str = ""


def to_params(
    layout: SpanLayout,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    placement: Placement = "sequential",
    **ids: str,
) -> dict[str, Any]:
    """The ``kv_transfer_params`` of a laid-out prompt; {} for an ordinary one.

    ids: id and prepare_for, see `SpanParams`.
    """
    if not layout.spans:
        return {}
    value: dict[str, Any] = {
        "spans": [list(span) for span in layout.spans],
        "scope": layout.scope,
    }
    if placement != "sequential":
        value["placement"] = placement
    value.update({name: given for name, given in ids.items() if given})
    return {KEY: {**value, "timeout_s": timeout_s}}


def fields_of(params: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What a request's ``kv_transfer_params`` tell kvspan, if anything.

    Raises:
        UsageError: where that is no object, or has fields that kvspan does not know.
    """
    value = (params or {}).get(KEY)
    if value is None:
        return None
    where = f"kv_transfer_params.{KEY}"
    if not isinstance(value, Mapping):
        raise UsageError(f"{where}: expected an object, got {type(value).__name__}")
    known = (*_FIELDS, _OF_HYBRIDS)
    for name in value:
        if name not in known:
            hint = closest(str(name), known)
            raise UsageError(f"{where}.{name}: unknown field{hint}", expected=", ".join(known))
    return value


def from_params(
    params: Mapping[str, Any] | None, token_ids: Sequence[int], block_size: int
) -> SpanParams | None:
    """The spans a request declares, or None. Raises UsageError where they make no sense."""
    value = fields_of(params)
    if value is None:
        return None
    where = f"kv_transfer_params.{KEY}"
    if _OF_HYBRIDS in value:
        raise UsageError(f"{where}.{_OF_HYBRIDS}: is for hybrid models, which have no spans")
    spans = value.get("spans", [])
    if not isinstance(spans, Sequence) or not all(_is_pair(span) for span in spans):
        raise UsageError(f"{where}.spans: expected a list of [start, end], got {spans!r}")
    placement = value.get("placement", "sequential")
    if placement not in PLACEMENTS:
        raise UsageError(
            f"{where}.placement: expected one of {', '.join(PLACEMENTS)}; got {placement!r}"
        )
    timeout = value.get("timeout_s", DEFAULT_TIMEOUT_S)
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not number or not 0 <= timeout <= MAX_TIMEOUT_S:
        raise UsageError(
            f"{where}.timeout_s: expected seconds, 0 to {MAX_TIMEOUT_S}; got {str(timeout)[:40]!r}"
        )
    if not spans:
        return None
    layout = layout_from_tokens(token_ids, spans, block_size, value.get("scope", "anchored"))
    id, prepare_for = (str(value.get(name, "")) for name in ("id", "prepare_for"))
    return SpanParams(layout, float(timeout), placement, id, prepare_for)


def _is_pair(span: object) -> bool:
    return (
        isinstance(span, Sequence)
        and len(span) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) for n in span)
    )
