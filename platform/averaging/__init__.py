"""What clients send is added up: weights of updates, their mean, and what the server makes of it."""
