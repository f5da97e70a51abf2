"""Stages that several methods have: searches and final evaluations."""
