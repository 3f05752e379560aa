"""Requests, and which of them share a step."""
