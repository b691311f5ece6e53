"""The per-token work of drafters that copy, compiled: functions over arrays, so that a large batch
costs the host little.

numba compiles a function when it is first called and keeps the result on disk. `drafts` has what all share, `suffixes`
a suffix automaton over a growing text, `following` a follower of a text that is copied with changes, `grams` the places
of n-grams; the files beside this folder own the arrays. Compiled code looks at no array's end: the tests run all of it
once with ``NUMBA_BOUNDSCHECK=1``.
"""
