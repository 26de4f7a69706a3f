"""Queries: trees of messages, joins and generates, and everything that can be done to one unrun."""
