"""Exact sampling: the distribution a request asks for, and the accept rule that keeps it."""
