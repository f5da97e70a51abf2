"""Methods whose result is one model per tier, or one for all clients."""
