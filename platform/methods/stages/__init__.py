"""Stages that several methods share: searches and final evaluations."""
