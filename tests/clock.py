# SPDX-License-Identifier: Apache-2.0
"""A clock that tests set."""


class Clock:
    """Replaces the module `time`; starts at 1000 seconds."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now
