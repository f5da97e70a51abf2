"""Methods on elastic supernets, whose subnets serve any target."""
