"""Methods on elastic supernets, whose subnets fit any target."""
