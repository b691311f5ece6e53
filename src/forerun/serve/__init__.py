"""An OpenAI-compatible server on the engine: ``forerun serve``. Needs the extra ``serve``.

`app` puts the routes together, `protocol` holds what goes over the wire, `session` is the engine with its limits, and
everything else is one concern a file.
"""
