"""Methods whose clients train a leading part of a network: static, nested or rolling widths, or depths."""
