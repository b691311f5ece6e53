"""The engine tests' tiny checkpoints."""

from engine.conftest import checkpoint, draft_checkpoint

__all__ = ["checkpoint", "draft_checkpoint"]
