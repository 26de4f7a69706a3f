"""What ``kv_connector_extra_config`` may hold, for models with attention only and for hybrids.

Knows neither vLLM nor the model, so that settings can be checked before either is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvspan.errors import UsageError
from kvspan.parentheses import Parentheses
from kvspan.query.checks import closest

Kind = Literal["spans", "hybrid"]

WHERE = "kv_connector_extra_config"
_MOST = 2**40


@dataclass(frozen=True)
class Setting:
    """One setting.

    default: its type is the setting's: bool, int (a whole number), float (any number) or str.
    text: what it does, in a few words. least: of a number. choices: of a text, where they are few.
    check: raises UsageError for a text that cannot be used; given the text and where it stands.
    """

    default: bool | int | float | str
    text: str
    least: float = 0
    choices: tuple[str, ...] = ()
    check: Callable[[str, str], object] | None = None

    def checked(self, value: object, where: str) -> Any:
        """The value in the setting's type; UsageError for one that makes no sense."""
        if isinstance(self.default, (int, float)) and not isinstance(self.default, bool):
            return self._number(value, where)
        kind = type(self.default)
        if not isinstance(value, kind):
            name = "text" if kind is str else "true or false"
            raise UsageError(f"{where}: wrong type", expected=name, found=repr(value))
        if self.choices and value not in self.choices:
            raise UsageError(
                f"{where}: unknown value", expected=" or ".join(self.choices), found=repr(value)
            )
        if self.check is not None and value:
            self.check(str(value), where)
        return value

    def _number(self, value: object, where: str) -> float:
        whole = isinstance(self.default, int)
        if (
            isinstance(value, bool)
            or not isinstance(value, int if whole else (int, float))
            or not self.least <= value < _MOST
        ):
            raise UsageError(
                f"{where} is out of range",
                expected=f"a{' whole' * whole} number, {self.least:.3g} or more",
                found=repr(value),
            )
        return value if whole else float(value)


def _policy(text: str, where: str) -> None:
    from kvspan.vllm.hybrid.policy import parse_policy

    parse_policy(text, where)


_BOTH = {
    "disk": Setting("", "folder that outlives the server, for one server at a time"),
    "disk_gib": Setting(32.0, "what the files in `disk` may take", least=2**-20),
    "parentheses": Setting(
        "", "PAD,START,SIBLING,END: tokens that mark spans in prompts",
        check=Parentheses.parse,
    ),
}  # fmt: skip
SETTINGS: dict[Kind, dict[str, Setting]] = {
    "spans": {
        "steer": Setting(False, "rotate spans where they lie instead of copying them"),
        "host_gib": Setting(0.0, "memory for spans that the device has evicted; 0 for none"),
        **_BOTH,
    },
    "hybrid": {
        "replay": Setting(
            "exact",
            "exact, bounded:EPS, ratio:R or off: how recurrent states are rebuilt",
            check=_policy,
        ),
        "decay": Setting(False, "keep what bounded:EPS needs, where it is not the default"),
        "k_min": Setting(256, "tokens that bounded and ratio replay at the least", least=1),
        "state_every": Setting(2048, "tokens between states that are kept", least=1),
        "host_gib": Setting(4.0, "memory for what is kept", least=2**-20),
        "hidden": Setting(
            "pair", "sum takes half the memory, approximate", choices=("pair", "sum")
        ),
        "decode": Setting(True, "whether generated tokens are kept"),
        "min_match": Setting(1, "shorter matches are computed again", least=1),
        **_BOTH,
        "disk_wait_s": Setting(10.0, "seconds that a request waits for its files at the most"),
    },
}
_MODELS = {"spans": "models with attention only", "hybrid": "hybrid models"}


def check_setting(name: str, value: object, where: str, kind: Kind | None = None) -> Any:
    """One setting's value, checked; UsageError as from `check_settings`."""
    known = {**SETTINGS["hybrid"], **SETTINGS["spans"], **(SETTINGS[kind] if kind else {})}
    if name not in known:
        raise UsageError(
            f"{where}: unknown setting{closest(str(name), tuple(known))}",
            expected=", ".join(sorted(SETTINGS[kind] if kind else known)),
        )
    if kind and name not in SETTINGS[kind]:
        other = _MODELS["spans" if kind == "hybrid" else "hybrid"]
        raise UsageError(f"{where}: is for {other}, this is one of {_MODELS[kind]}")
    return known[name].checked(value, where)


def in_config(name: str) -> str:
    """What a setting is called in the server's configuration."""
    return f"{WHERE}.{name}"


def check_settings(
    extra: Mapping[str, object] | None,
    kind: Kind | None = None,
    called: Callable[[str], str] = in_config,
) -> dict[str, Any]:
    """The settings of `extra`, checked; where the kind of model is known, with all defaults.

    called: how the user sets a setting, for messages.

    Raises:
        UsageError: for a setting that is unknown, makes no sense, or is none of this kind's.
    """
    found = {
        name: check_setting(name, value, called(name), kind)
        for name, value in (extra or {}).items()
    }
    if "disk_gib" in found and not found.get("disk"):
        raise UsageError(
            f"{called('disk_gib')}: no folder to keep files in",
            expected=f"{called('disk')} with it",
        )
    if kind == "spans" and found.get("disk") and not found.get("host_gib"):
        raise UsageError(
            f"{called('disk')}: spans are kept on disk behind memory",
            expected=f"{called('host_gib')} with it",
        )
    if found.get("hidden") == "sum" and found.get("replay", "exact") == "exact":
        raise UsageError(
            f"{called('hidden')}: exact replay needs exact hidden vectors",
            expected=f"hidden pair, or {called('replay')} with another policy", found="hidden sum",
        )  # fmt: skip
    defaults = {name: setting.default for name, setting in SETTINGS[kind].items()} if kind else {}
    return {**defaults, **found}


def described() -> str:
    """All settings, one a line: name, default, meaning."""
    lines = []
    for kind, settings in SETTINGS.items():
        lines.append(f"of {_MODELS[kind]}:")
        for name, setting in settings.items():
            default = json.dumps(setting.default) if setting.default != "" else "none"
            lines.append(f"  {name:<12} {default:<8} {setting.text}")
    return "\n".join(lines)


def keeps_decays(extra: Mapping[str, object]) -> bool:
    """Whether what bounded:EPS needs is kept, for all requests or for those that ask for it."""
    return bool(extra.get("decay")) or str(extra.get("replay", "")).startswith("bounded")


def parse_setting(text: str, where: str) -> tuple[str, Any]:
    """NAME=VALUE of a command line, VALUE as in JSON or plain text; UsageError for nonsense.

    >>> parse_setting("state_every=512", "--connector-option")
    ('state_every', 512)
    >>> parse_setting("replay=ratio:0.05", "--connector-option")
    ('replay', 'ratio:0.05')
    """
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or not name:
        raise UsageError(f"{where}: no setting", expected="NAME=VALUE", found=repr(text))
    known = {**SETTINGS["spans"], **SETTINGS["hybrid"]}
    if name in known and not isinstance(known[name].default, str):
        try:
            return name, json.loads(value)
        except ValueError:
            pass  # as text it is of the wrong type, and that is said where it is checked
    return name, value
