"""Late binding: what an attempt needs is put together and handed to a pod's agent."""
