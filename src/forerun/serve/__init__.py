"""An OpenAI-compatible server on the engine: ``forerun serve``. Needs the extra ``serve``."""
