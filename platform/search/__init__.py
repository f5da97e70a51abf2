"""Architecture search with ask/tell searchers."""
