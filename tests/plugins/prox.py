"""FedProx (Li et al. 2020) as a local rule of one's own."""


def prox(client, *, mu: float = 0.01):
    """Pulls every parameter towards the value that it was received with."""
    received = client.received

    def correct(name, parameter, gradient):
        gradient.add_(parameter - received[name], alpha=mu)

    return correct
