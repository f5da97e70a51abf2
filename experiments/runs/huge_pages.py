"""Huge memory pages, which must be requested before torch's first allocation."""

import os


def prefer_huge_pages() -> None:
    """Makes torch allocate large tensors in huge pages, in this process and the workers that it starts.

    A supernet of 300 MB has 70 000 small pages, whose first access costs more than averaging does. Huge pages make the
    extraction and averaging of a round a third faster. Torch reads the variable at its first allocation.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
