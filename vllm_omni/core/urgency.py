# SPDX-License-Identifier: Apache-2.0
"""The order in which stages of speech and of pictures compute what waits in them."""

from typing import NamedTuple


class Urgency(NamedTuple):
    """The key of a window of speech, or of a job of pictures. The least is next.

    Attributes:
        priority: The request's.
        has_begun: Some of it was made. What has not begun comes first: a client waits for the first sound, or a job has
            to catch up with those that it can be computed with.
        behind: Which has fallen behind the most. Of speech, when the window is due: its client has played what it has
            got by then (`time.monotonic()`). Of pictures, which nobody plays, how much longer they take than alone; the
            more, the less this is.
    """

    priority: int
    has_begun: bool
    behind: float
