"""The parts of tables, figures and pages: words, numbers, blocks and pictures."""
