"""The order of the attachments: the lowest is called first, also to close.

QUEUE_LIMIT     refuses a request before anything is done for it
HELD_FILES      closes before requests and held sequences are ended, so that it forgets none
STORES          ends what is open and keeps the cache, while all others still answer
GRAMMARS        follow what was decided before drafts are made after it
LOADING
OTHERS          plug-ins (`Attachment.order`)
DRAFTING        sees the plan after everybody who may have changed what it is made of
KV_EVENTS
RECORDER        stands at the doors: it sees each call last, as the scheduler gets it
"""

import enum

from quire.engine.loop.attachment import Attachment


class Order(enum.IntEnum):
    """Places of our own attachments."""

    QUEUE_LIMIT = 10
    HELD_FILES = 15
    STORES = 20
    GRAMMARS = 30
    LOADING = 40
    OTHERS = Attachment.order
    DRAFTING = 60
    KV_EVENTS = 70
    RECORDER = 90
