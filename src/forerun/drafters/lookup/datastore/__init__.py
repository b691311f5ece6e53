"""Datastores for `rest`: a corpus as token ids with a sorted index of places, memory-mapped.

`build` goes from data files to a directory, `Datastore.open` from there to matches and what followed them. Knows
tokenizers by their identity; knows no model and no drafter.
"""

from forerun.drafters.lookup.datastore.build import build, write
from forerun.drafters.lookup.datastore.format import Manifest
from forerun.drafters.lookup.datastore.search import Datastore, Match

__all__ = ["Datastore", "Manifest", "Match", "build", "write"]
