"""The HTTP API under ``/v1``: types, strict decoding, handlers, server-sent events."""
