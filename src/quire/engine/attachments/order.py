"""The order of the attachments: the lowest is called first, also on close.

QUEUE_LIMIT     refuses a request before any work is done for it
RETAINED_FILES  closes before requests end, so that no file is deleted then
STORES          ends open requests and saves the cache, while all others still answer
GRAMMARS        follow the last decisions before drafts are made from them
LOADING
PAUSING         marks what no other attachment has marked
OTHERS          plug-ins (`Attachment.order`)
DRAFTING        sees the plan after all attachments that may have changed its inputs
KV_EVENTS
RECORDER        wraps the doors: it sees each call last, as the scheduler gets it
"""

import enum

from quire.engine.loop.attachment import Attachment


class Order(enum.IntEnum):
    """Order numbers of our own attachments."""

    QUEUE_LIMIT = 10
    RETAINED_FILES = 15
    STORES = 20
    GRAMMARS = 30
    LOADING = 40
    PAUSING = 45
    OTHERS = Attachment.order
    DRAFTING = 60
    KV_EVENTS = 70
    RECORDER = 90
