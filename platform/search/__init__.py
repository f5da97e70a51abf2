"""Ask/tell searchers over architectures."""
