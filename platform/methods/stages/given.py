"""What a configuration names of a space: one architecture."""

from fedloom.platform.federation.world import World
from fedloom.platform.spaces.slices import Architecture


def given_architecture(world: World, text: str | None, key: str = "method.architecture") -> Architecture:
    """The architecture of this text, the space's first if there is none; ValueError naming the configuration key."""
    if text is None:
        return tuple(0 for _ in world.space.options)
    try:
        return world.space.parse(text)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
