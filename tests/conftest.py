"""What holds for all tests: properties are searched without a clock, and Ctrl-C is heeded."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# A busy machine is no fault of a property's.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# A shell that starts the tests in the background has them, and every command that they start, ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
