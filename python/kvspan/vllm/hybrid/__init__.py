"""Tail-Replay under vLLM: hybrid models resume at any token of a cached prefix.

A hybrid (full attention + Gated DeltaNet) keeps one recurrent state per layer and sequence, which
exists only where the sequence stands. Kept on the host are, per page of one attention block: the
attention KV and the vectors that enter each group of linear-attention layers; and, now and then, a
whole recurrent state. A request whose prompt agrees with cached tokens up to any token gets the KV
copied and the state rebuilt by running the group's layers over a tail of those vectors
(arXiv 2608.30310): from the nearest state kept (exact), or from zero over a short tail (said so in
the answer, never a source for others), whose length a bound on its error may give.

`store`: what is kept, by content. `tracking`: what each request reads and leaves behind. `decay`:
how short a tail may be. None of them knows vLLM. `scheduling`, and `working` with `replay` and
`gates`: the scheduler's and the worker's side. `connector`: the two joined to vLLM's interface.
`models`: vLLM's models, built with the buffers of `capture`; `running`: a group's layers by
themselves, compiled where the model is.
"""
