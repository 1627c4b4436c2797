"""The decision core: a state machine over events that does no I/O and reads no clock.

``Machine.handle(event, now)`` takes one event and returns instructions; see
:mod:`firepool_broker.core.events` and :mod:`firepool_broker.core.instructions`.
"""
