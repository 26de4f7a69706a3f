"""``kv_connector_extra_config``: what is said of settings before vLLM or a model is there."""

from __future__ import annotations

from typing import Any

import pytest

from kvspan.errors import UsageError
from kvspan.vllm.settings import SETTINGS, check_settings, parse_setting


def test_defaults_are_of_the_kind_of_model() -> None:
    for kind, settings in SETTINGS.items():
        found = check_settings(None, kind)
        assert found == {name: setting.default for name, setting in settings.items()}
        with_disk = found | {"disk": "d", "host_gib": 0.5}
        assert check_settings(with_disk, kind) == with_disk
    assert check_settings({"state_every": 64}) == {"state_every": 64}


@pytest.mark.parametrize(
    ("extra", "kind", "said"),
    [
        ({"host_gb": 3}, "hybrid", r"\.host_gb: unknown setting \(did you mean host_gib\?\); exp"),
        ({"stear": True}, None, r"\.stear: unknown setting \(did you mean steer\?\)"),
        ({"zzzzzz": 1}, None, r"\.zzzzzz: unknown setting; expected decay, decode"),
        ({"steer": True}, "hybrid", "is for models with attention only, this is one of hybrid"),
        ({"replay": "exact"}, "spans", "is for hybrid models, this is one of models with attent"),
        ({"steer": "yes"}, None, "wrong type; expected true or false; found 'yes'"),
        ({"disk": 3}, None, "wrong type; expected text; found 3"),
        ({"state_every": 0}, None, "expected a whole number, 1 or more; found 0"),
        ({"state_every": 0.5}, None, "expected a whole number, 1 or more; found 0.5"),
        ({"host_gib": True}, None, "expected a number, 0 or more; found True"),
        ({"host_gib": float("nan")}, None, "expected a number, 0 or more; found nan"),
        ({"host_gib": "4"}, None, "expected a number, 0 or more; found '4'"),
        ({"disk": "d", "disk_gib": 0}, None, "disk_gib is out of range; expected a number, 9.54e"),
        ({"disk_gib": 3}, None, r"no folder to keep files in; expected kv_\w+\.disk with it"),
        ({"disk": "d"}, "spans", r"are kept on disk behind memory; expected kv_\w+\.host_gib with"),
        ({"hidden": "half"}, None, "unknown value; expected pair or sum; found 'half'"),
        (
            {"hidden": "sum"},
            None,
            r"\.hidden: exact replay needs exact hidden vectors; exp",
        ),
        ({"replay": "ratio:2"}, None, r"\.replay: unknown replay policy; expected exact, bounded"),
        ({"parentheses": "1,2"}, None, "expected PAD,START,SIBLING,END; found '1,2'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_makes_no_sense_is_one_line(extra: dict[str, Any], kind: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        check_settings(extra, kind)
    assert "\n" not in str(caught.value)


def test_settings_of_a_command_line() -> None:
    words = ["disk=17", "host-gib=0.5", "decode=false", "replay=ratio:0.05", "hidden=sum"]
    found = dict(parse_setting(word, "--x") for word in words)
    assert found == {
        "disk": "17", "host_gib": 0.5, "decode": False, "replay": "ratio:0.05", "hidden": "sum",
    }  # fmt: skip
    assert check_settings(found, "hybrid")["host_gib"] == 0.5
    name, value = parse_setting("decode=yes", "--x")
    with pytest.raises(UsageError, match="expected true or false; found 'yes'"):
        check_settings({name: value})
    for word in ("decode", "=3", ""):
        with pytest.raises(UsageError, match="--x: no setting; expected NAME=VALUE"):
            parse_setting(word, "--x")
