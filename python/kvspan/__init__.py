"""kvspan: reuse cached context that is not a prefix.

    import kvspan as kv

    engine = kv.open_engine("demo")
    query = kv.g("demo", kv.cross(kv.system("Answer."), kv.plus(passages), kv.user("Who?")))
    print(kv.run(query, engine=engine).answers[0])

Importing the package loads neither torch nor numpy nor yaml: every name below is imported when it
is first used. See :mod:`kvspan.query.builders` for the query nodes, :func:`kvspan.executor.run`,
:func:`kvspan.engine.open_engine`, and :mod:`kvspan.ops` for the core operations.
"""

from __future__ import annotations

# Not from typing: that takes longer to import than all else here, and Ctrl-C would meet it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from kvspan.engine import open_engine as open_engine
    from kvspan.errors import KvspanError as KvspanError
    from kvspan.errors import UsageError as UsageError
    from kvspan.executor import arun as arun
    from kvspan.executor import run as run
    from kvspan.query.builders import assistant as assistant
    from kvspan.query.builders import augment as augment
    from kvspan.query.builders import cross as cross
    from kvspan.query.builders import from_corpus as from_corpus
    from kvspan.query.builders import g as g
    from kvspan.query.builders import map_ as map_
    from kvspan.query.builders import monad as monad
    from kvspan.query.builders import options as options
    from kvspan.query.builders import par as par
    from kvspan.query.builders import plus as plus
    from kvspan.query.builders import print_ as print_
    from kvspan.query.builders import reduce as reduce
    from kvspan.query.builders import repeat as repeat
    from kvspan.query.builders import seq as seq
    from kvspan.query.builders import system as system
    from kvspan.query.builders import user as user
    from kvspan.query.builders import zip_ as zip_
    from kvspan.query.read import load as load
    from kvspan.query.read import loads as loads

__version__ = "0.1.0"

_LAZY = {
    **dict.fromkeys(
        ("user", "system", "assistant", "seq", "par", "cross", "plus", "g"), "query.builders"
    ),
    **dict.fromkeys(("repeat", "map_", "zip_", "monad", "print_", "augment"), "query.builders"),
    **dict.fromkeys(("reduce", "options", "from_corpus"), "query.builders"),
    **dict.fromkeys(("load", "loads"), "query.read"),
    **dict.fromkeys(("run", "arun"), "executor"),
    **dict.fromkeys(("KvspanError", "UsageError"), "errors"),
    "open_engine": "engine",
}

__all__ = [*_LAZY, "__version__"]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'kvspan' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"kvspan.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
