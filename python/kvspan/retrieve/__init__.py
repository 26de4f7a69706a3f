"""Retrieval (R): corpora from files, cut into chunks and searched without a server or a download.

    corpora = Corpora({"town": "town/"})
    kvspan.run(kv.g("demo", kv.cross(kv.from_corpus("town", q), q)), retriever=corpora)

``documents`` reads files, ``chunking`` cuts them, ``search`` finds chunks, ``index`` keeps all
that on disk, and ``corpora`` is the retriever.
"""

from kvspan.retrieve.corpora import Corpora as Corpora
