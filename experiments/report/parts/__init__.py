"""What tables, figures and pages are made of: words, blocks and pictures."""
