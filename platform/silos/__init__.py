"""Cross-silo federated learning: every client in every round, with a state and a network of its own."""
