"""kvspan: reuse cached context that is not a prefix.

Importing the package loads neither torch nor an engine; see :mod:`kvspan.ops` for the core
operations and :func:`kvspan.engine.open_engine` for running queries.
"""

__version__ = "0.1.0"
