"""Where large requests and answers are made, so that no stream stands still for them."""

from typing import Final

from castline.runtime.side_threads import SideThreads

large_requests: Final = SideThreads("large-request", 2)
