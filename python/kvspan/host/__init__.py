"""The host tier: cached bytes that survive eviction from the device.

One store for span blocks, full-attention KV and hidden streams: bytes by content key, in host
memory, and on disk too if wanted. It knows nothing of models or tensors; what a key means is its
caller's (``kvspan.ops`` makes content keys), and so is the layout of the bytes. Threads may share
a tier; copies run outside of its lock, and release the GIL.

    >>> from kvspan.host import HostTier
    >>> tier = HostTier(1 << 20, page_bytes=4096)
    >>> tier.put(b"key", [b"hidden", b"stream"], cost=2e9, kind="hidden")
    True
    >>> out = bytearray(12)
    >>> tier.get(b"key", out), bytes(out)
    (True, b'hiddenstream')
    >>> tier.close()

The calls:

``put(key, parts, cost=, kind=)``
    Stores a copy. False if it is refused; ``stats().refusals`` says how often and why.
``reserve(key, nbytes, cost=, kind=)``
    The same without a copy: a :class:`Reservation` with writable ``pages`` to fill, by a copy from
    the device for instance; ``commit()`` once that has finished, ``abort()`` if it failed. The key
    is not found before. None if refused. Without a key yet (None), or to go on writing to what
    may be found: ``Reservation.publish(key, cost)``.
``get(key, out)``
    Copies into the given buffers, together as long as what was stored; False if it is not there
    (then what ``out`` holds is undefined).
``view(key)``
    What is stored, in place: a :class:`View` with read-only ``pages``, pinned until ``release()``
    (or the end of ``with``). None if it is not there.
``fetch(keys, then=)``
    Brings entries from disk into memory in the background: a :class:`Fetch`, which pins them until
    ``release()`` and says when it is ``done``. A caller that must not wait for a disk looks at
    ``in_memory(key)``, fetches what is not, and takes ``view(key, from_disk=False)`` then.
``contains(key)``, ``stored_keys()``, ``nbytes(key)``, ``pin(key)``, ``unpin(key)``,
``remove(key)``, ``clear()``, ``flush()``, ``stats()``, ``close()``
    As they say. A pinned entry is not evicted; pins are counted. A removed entry is not found any
    more; its memory is free once its last pin is.

Memory is one piece, ``memory_bytes`` long or given by the caller (a :class:`SharedMemory` that
other processes map, say, and write at a reservation's ``spans``), cut into pages of
``page_bytes``; an entry has whole pages that lie anywhere, so memory never fragments.

:class:`CopyQueue` moves entries in the background, between ``pages`` and blocks of a pool:

    >>> import numpy as np
    >>> from kvspan.host import CopyQueue
    >>> pool = np.arange(32, dtype=np.uint8).reshape(4, 8)  # [num_blocks, ...]
    >>> with HostTier(1 << 20) as tier, CopyQueue() as queue:
    ...     with tier.reserve(b"blocks", 16, cost=2e9) as entry:
    ...         stored = queue.submit([(pool, [3, 1])], entry.pages).wait()
    ...     pool[:] = 0
    ...     with tier.view(b"blocks") as entry:
    ...         restored = queue.submit(entry.pages, [(pool, [0, 1])]).wait()
    >>> pool[:2].tolist()
    [[24, 25, 26, 27, 28, 29, 30, 31], [8, 9, 10, 11, 12, 13, 14, 15]]

Eviction is GreedyDual-Size-Frequency: an entry is worth the FLOPs that a hit saves, ``cost``, times
its uses, for each byte that it takes. That is added to a clock, which is the worth of what was
evicted last; the lowest sum goes first. Where costs, sizes and uses are equal it is LRU.

The disk level (``disk=DiskLevel(path, bytes, fingerprint)``) gets a copy of each entry in the
background and has a budget of its own. See :mod:`kvspan.host.disk` for what a crash leaves behind:
never wrong bytes.
"""

from kvspan.host.copying import CopyJob, CopyQueue
from kvspan.host.disk import DiskLevel
from kvspan.host.entries import Reservation, View
from kvspan.host.reading import Fetch
from kvspan.host.shared import SharedMemory, map_shared
from kvspan.host.stats import HostStats, LevelStats
from kvspan.host.tier import HostTier

__all__ = [
    "CopyJob",
    "CopyQueue",
    "DiskLevel",
    "Fetch",
    "HostStats",
    "HostTier",
    "LevelStats",
    "Reservation",
    "SharedMemory",
    "View",
    "map_shared",
]
