"""Capture: what a remote cell needs from the notebook, and how it travels there and back.

=================  ==============================================================================
`names`            which names a cell reads, binds and changes (syntax only); its parts are
                   `walker`, `scopes`, `magictext`, `found`
`cell`             the decision: what travels, what is refused, and in which words
`pickling`         by value, into the pod's ``__main__``, within a limit
`culprits`         which object inside a value is to blame; sizes without copies
`project`          the person's own modules as one package
`transfer`         single values: ``-i`` and ``-o``
`returning`        what comes back becomes the notebook's own classes again
=================  ==============================================================================
"""

from __future__ import annotations
