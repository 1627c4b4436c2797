"""Durable state: the SQL store, the outputs of jobs, and content-addressed blobs."""
