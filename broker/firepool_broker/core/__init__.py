"""The decision core: a state machine over events that does no I/O and reads no clock.

``Machine.handle(event, now)`` takes one event and returns instructions; see
:mod:`firepool_broker.core.events` and :mod:`firepool_broker.core.instructions`. Everything a broker
knows can be given back to a new machine with ``Machine.restore``.
"""

from firepool_broker.core.machine import Machine

__all__ = ["Machine"]
