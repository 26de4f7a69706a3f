"""Tail-Replay (arXiv 2608.30310) on the embedded engine: hybrid models resume at any token.

A hybrid model has full-attention (FA) layers, whose keys and values can be cut at any token, and
linear-attention (LA) layers of the Gated DeltaNet kind, whose state exists at one position only.
What is kept per token is the FA layers' KV and output hidden vectors; the LA state at a boundary
is rebuilt by replaying each group's LA layers over the last hidden vectors. Who does what:

``groups``     which layers form which groups; from the config, without torch
``families``   one adapter per model family: where its weights are and in which order they act
``pieces``     where tokens stand in a pass, so that their bits do not depend on what follows
``rows``       the forward pass of a run of tokens: FA over the paged pool (``attention``), LA by
               kvspan's ops
``hidden``     the kept hidden vectors, beside the KV and under the same block ids
``state``      recurrent states, exact checkpoints of them and the marks that bound errors
``policy``     exact, bounded(eps), ratio(r), zero: how much of each group is to be replayed
``plan``       the replay's start in each group, what it starts from, and its error bound
``replay``     carries a plan out
``match``      the longest cached prefix of a prompt, to the token
``engine``     the embedded engine with all this in it

Everything runs in float32, bfloat16 or float16 with float32 recurrent states.
"""
