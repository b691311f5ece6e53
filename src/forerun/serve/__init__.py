"""``forerun serve`` runs an OpenAI-compatible server on the engine. Needs the extra ``serve``."""
